"""A signal in every phase of a run: one agreed checkpoint, code 75, and it goes on (rows 7 and 8).

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


def test_second_signal_keeps_last_checkpoint(undisturbed, tmp_path):
    seconds = [("SIGTERM", 7), ("SIGKILL", 11)]
    faults = [Fault(kind="signal", rank=1, step=at, signals=("SIGTERM", each), seconds=0.1) for each, at in seconds]
    run = UnderFaults(tmp_path, faults)
    run.launch_until_done(
        (75, r"\[1\] ended by SIGTERM; the same command resumes"),
        (75, "rank 1 failed first: killed by SIGKILL"),
        (0, ""),
    )
    assert run.causes() == [(1, "exit code 75", 75), (1, "killed by SIGKILL", 75)]
    assert_same(run, undisturbed(2))
