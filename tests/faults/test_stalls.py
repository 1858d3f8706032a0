"""A process that hangs or is stopped: noticed within the deadline, named, restarted (row 5)."""

import re

import pytest
from support.faults import Fault
from support.matrix import DEADLINE, HUNG, ROOM, UnderFaults, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(900)]
TIMEOUTS = {"rendezvous": 60, "heartbeat": 60, "step": DEADLINE}


def assert_noticed(run: UnderFaults, undisturbed, *named: tuple[int, str], processes: int = 2) -> None:
    """The run goes on after each hang, and names each rank."""
    ended = run.launch(restarts=len(named))
    assert ended.code == 0, ended.stderr
    for (rank, how), (found, ending, code) in zip(named, run.causes(), strict=True):
        assert (found, code) == (rank, 75), ended.stderr
        assert ending.startswith(how)
    assert ended.stderr.count("--- stacks of rank") >= len(named)
    assert max(run.detected()) < DEADLINE + HUNG + ROOM
    assert_same(run, undisturbed(processes))


def test_names_hanging_rank(undisturbed, tmp_path):
    faults = [
        Fault(kind="hang", rank=1, phase="read", step=2),
        Fault(kind="hang", rank=1, step=5),
        Fault(kind="hold", rank=0, phase="data", step=9),
        Fault(kind="stop", rank=0, step=13),
    ]
    run = UnderFaults(tmp_path, faults, timeouts=TIMEOUTS)
    assert_noticed(run, undisturbed, (1, ""), (1, ""), (0, ""), (0, "stopped (SIGSTOP)"))


def test_names_hanging_rank_of_four(undisturbed, tmp_path):
    faults = [Fault(kind=kind, rank=rank, step=step) for kind, rank, step in [("hang", 2, 5), ("stop", 3, 9)]]
    run = UnderFaults(tmp_path, [*faults, Fault(kind="hold", rank=1, step=13)], 4, timeouts=TIMEOUTS)
    assert_noticed(run, undisturbed, (2, ""), (3, "stopped (SIGSTOP)"), (1, ""), processes=4)


def test_names_ranks_in_same_phase(undisturbed, tmp_path):
    """The batches of an evaluation tell who is behind; otherwise it is the one in the user's code with idle devices."""
    faults = [Fault(kind="hang", rank=1, phase=phase, step=step) for phase, step in [("evaluation", 8), ("save", 12)]]
    run = UnderFaults(tmp_path, faults, timeouts=TIMEOUTS)
    ended = run.launch(restarts=2)
    assert ended.code == 0, ended.stderr
    assert [code for _, _, code in run.causes()] == [75, 75], ended.stderr
    for said in (
        r"rank 1 at step 8, evaluation, for \d+ s, in \S+ \(.*/faults\.py\)\. Rank 0 waits at .* after 2 batches",
        r"rank 1 at step 12, save, for \d+ s, in \S+ \(.*/faults\.py\)\. Rank 0 waits at step 12, save, ",
        r"rank 1 failed first: blocked the others, according to rank ",
    ):
        assert re.search(said, ended.stderr), ended.stderr
    assert "faults.py" in run.log(1), "the stack of the one that hangs"
    assert max(run.detected()) < DEADLINE + HUNG + ROOM
    assert_same(run, undisturbed(2))


def test_tolerates_delays(undisturbed, tmp_path):
    """Row 25 among them: a process that comes seconds after the others; then a pause, and a slow reader."""
    faults = [
        Fault(kind="pause", rank=1, phase="start", seconds=6.0),
        Fault(kind="pause", rank=1, step=7, seconds=3.0),
        Fault(kind="slow", rank=1, phase="read", step=5, seconds=0.3),
    ]
    run = UnderFaults(tmp_path, faults, timeouts=TIMEOUTS)
    assert run.launch().code == 0
    assert_same(run, undisturbed(2))
