"""A process that hangs or is stopped: noticed within the deadline, named, restarted (row 5).

`tests/multiprocess/test_hangs.py` has processes without a launcher.
"""

import re

import pytest
from matrix import DEADLINE, HUNG, ROOM, UnderFaults, assert_same

from spmdkit.testing import Fault

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]
TIMEOUTS = {"rendezvous": 60, "heartbeat": 60, "step": DEADLINE}


def assert_noticed(run: UnderFaults, undisturbed, rank: int, processes: int = 2) -> str:
    ended = run.launch(restarts=2)
    assert ended.code == 0, ended.stderr
    ((named, how, code),) = run.causes()
    assert (named, code) == (rank, 75), ended.stderr
    assert max(run.detected()) < DEADLINE + HUNG + ROOM
    assert "--- stacks of rank" in ended.stderr
    assert_same(run, undisturbed(processes))
    return how


@pytest.mark.parametrize(
    ("kind", "rank", "phase", "step"),
    [
        ("hang", 1, "step", 7),
        ("hang", 0, "data", 6),
        ("hold", 1, "step", 7),
        ("hold", 0, "data", 6),
        ("hang", 1, "read", 9),
    ],
)
def test_one_that_hangs(kind, rank, phase, step, undisturbed, tmp_path):
    run = UnderFaults(tmp_path, [Fault(kind=kind, rank=rank, phase=phase, step=step)], timeouts=TIMEOUTS)
    assert_noticed(run, undisturbed, rank)


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ("evaluation", r"rank 1 at step 8, evaluation, for \d+ s, in _hang .*\. Rank 0 waits at .* after 2 batches"),
        ("save", r"all ranks are at step 8, save, .* not in the same place: rank 0, in .*; rank 1, in _hang "),
    ],
)
def test_where_all_are_in_the_same_phase(phase, said, undisturbed, tmp_path):
    """The batches of an evaluation tell who is behind; otherwise the function that each rank is in is named."""
    run = UnderFaults(tmp_path, [Fault(kind="hang", rank=1, phase=phase, step=8)], timeouts=TIMEOUTS)
    ended = run.launch(restarts=2)
    assert ended.code == 0, ended.stderr
    assert [code for _, _, code in run.causes()] == [75], ended.stderr
    assert re.search(said, ended.stderr), ended.stderr
    assert "actions.py" in run.log(1), "the stack of the one that hangs"
    assert max(run.detected()) < DEADLINE + HUNG + ROOM
    assert_same(run, undisturbed(2))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_is_stopped(rank, undisturbed, tmp_path):
    run = UnderFaults(tmp_path, [Fault(kind="stop", rank=rank, step=7)], timeouts=TIMEOUTS)
    assert assert_noticed(run, undisturbed, rank).startswith("stopped (SIGSTOP)")


@pytest.mark.parametrize(("kind", "rank"), [("hang", 2), ("stop", 3), ("hold", 1)])
def test_of_four(kind, rank, undisturbed, tmp_path):
    run = UnderFaults(tmp_path, [Fault(kind=kind, rank=rank, step=7)], 4, timeouts=TIMEOUTS)
    assert_noticed(run, undisturbed, rank, 4)


def test_a_pause_is_no_hang(undisturbed, tmp_path):
    run = UnderFaults(tmp_path, [Fault(kind="pause", rank=1, step=7, seconds=3.0)], timeouts=TIMEOUTS)
    assert run.launch().code == 0
    assert_same(run, undisturbed(2))


def test_a_late_host_is_waited_for(undisturbed, tmp_path):
    """Row 25: a process that comes seconds after the others."""
    run = UnderFaults(tmp_path, [Fault(kind="pause", rank=1, phase="start", seconds=6.0)])
    assert run.launch().code == 0
    assert_same(run, undisturbed(2))
