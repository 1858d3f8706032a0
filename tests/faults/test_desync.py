"""A rank that leaves a step out, and so its collectives: nobody waits for ever, and nothing wrong is kept (row 6)."""

import pytest
from matrix import DEADLINE, ROOM, UnderFaults, assert_same

from spmdkit.testing import Fault

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_left_out(rank, undisturbed, tmp_path):
    """From then on its steps meet those before them of the other; before the next save it finds that it lacks one."""
    timeouts = {"rendezvous": 60, "heartbeat": 60, "step": DEADLINE}
    run = UnderFaults(tmp_path, [Fault(kind="skip", rank=rank, step=6)], timeouts=timeouts)
    ended = run.launch(restarts=2)
    assert ended.code == 0, ended.stderr
    assert [(named, code) for named, _, code in run.causes()] == [(rank, 75)], ended.stderr
    assert f"Step 8: the state of rank {rank} has had 7 updates" in ended.stderr
    assert max(run.detected()) < DEADLINE + 10 + ROOM
    assert_same(run, undisturbed(2))
