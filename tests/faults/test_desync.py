"""A rank that leaves a step out, and so its collectives: nobody waits for ever, and nothing wrong is kept (row 6)."""

import pytest
from support.faults import Fault
from support.matrix import DEADLINE, ROOM, UnderFaults, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(900)]


def test_reports_skipped_step(undisturbed, tmp_path):
    """From then on its steps meet those before them of the other; before the next save it finds that it lacks one."""
    timeouts = {"rendezvous": 60, "heartbeat": 60, "step": DEADLINE}
    run = UnderFaults(
        tmp_path, [Fault(kind="skip", rank=rank, step=6 + 4 * rank) for rank in (0, 1)], timeouts=timeouts
    )
    ended = run.launch(restarts=2)
    assert ended.code == 0, ended.stderr
    assert [(named, code) for named, _, code in run.causes()] == [(0, 75), (1, 75)], ended.stderr
    assert "Step 8: the state of rank 0 has had 7 updates" in ended.stderr
    assert "Step 12: the state of rank 1 has had 11 updates" in ended.stderr
    assert max(run.detected()) < DEADLINE + 10 + ROOM
    assert_same(run, undisturbed(2))
