"""A signal in every phase of a run: one agreed checkpoint, code 75, and it goes on (rows 7 and 8).

`tests/multiprocess/test_signals.py` has the signals from outside, and processes without a launcher.
"""

import re

import pytest
from matrix import STEPS, UnderFaults, assert_same

from spmdkit.testing import Fault

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]


@pytest.mark.parametrize(
    ("phase", "step"), [("compile", None), ("read", 9), ("data", 6), ("step", 7), ("evaluation", 8), ("save", 4)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank(rank, phase, step, undisturbed, tmp_path):
    run = UnderFaults(tmp_path, [Fault(kind="signal", rank=rank, phase=phase, step=step)])
    ended = run.launch()
    assert ended.code == 75, ended.stderr
    assert set(ended.exits.values()) == {75}, ended.stderr
    (stopped,) = re.findall(rf"Stopped by SIGTERM to rank {rank} after step (\d+) of {STEPS}", ended.stdout)
    with run.started() as again:
        if int(stopped):
            assert again.checkpoints[-1] == int(stopped), "saved, whatever checkpoint.every says"
        assert again.wait(280).code == 0
    assert_same(run, undisturbed(2))


def test_the_launcher_starts_it_again_by_itself(undisturbed, tmp_path):
    run = UnderFaults(tmp_path, [Fault(kind="signal", rank=1, step=7, signals=("SIGUSR1",))])
    ended = run.launch(restarts=1)
    assert ended.code == 0, ended.stderr
    assert_same(run, undisturbed(2))


@pytest.mark.parametrize(
    ("second", "how", "said"),
    [
        ("SIGTERM", "exit code 75", "[1] ended by SIGTERM; the same command goes on"),
        ("SIGKILL", "killed by SIGKILL", "rank 1 failed first: killed by SIGKILL"),
    ],
)
def test_a_second_one_ends_it_and_the_last_checkpoint_is_whole(second, how, said, undisturbed, tmp_path):
    fault = Fault(kind="signal", rank=1, step=7, signals=("SIGTERM", second), seconds=0.1)
    run = UnderFaults(tmp_path, [fault])
    ended = run.launch()
    assert ended.code == 75, ended.stderr
    assert said in ended.stderr
    assert run.causes() == [(1, how, 75)]
    assert run.launch().code == 0
    assert_same(run, undisturbed(2))
