"""A signal in every phase of a run: one agreed checkpoint, code 75, and it goes on (row 7).

`tests/multiprocess/test_signals.py` has the signals from outside, and processes without a launcher.
"""

import re

import pytest
from support.faults import Fault
from support.matrix import STEPS, UnderFaults, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]


@pytest.mark.parametrize(
    ("phase", "step", "rank"),
    [("compile", None, 1), ("read", 9, 0), ("data", 6, 1), ("step", 7, 0), ("evaluation", 8, 1), ("save", 4, 0)],
)
def test_signal_to_one_rank_saves(rank, phase, step, undisturbed, tmp_path):
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


def test_launcher_restarts_after_signal(undisturbed, tmp_path):
    run = UnderFaults(tmp_path, [Fault(kind="signal", rank=1, step=7, signals=("SIGUSR1",))])
    ended = run.launch(restarts=1)
    assert ended.code == 0, ended.stderr
    assert_same(run, undisturbed(2))
