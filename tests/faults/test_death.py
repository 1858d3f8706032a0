"""A process that dies, in every way and on every rank: noticed, named, and as if it had not been (rows 1 to 4)."""

import pytest
from support.faults import Fault
from support.matrix import DEAD, DEADLINE, ROOM, UnderFaults, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(900)]
ENDINGS = {
    "kill": "killed by SIGKILL",
    "abort": "killed by SIGABRT",
    "segv": "killed by SIGSEGV",
    "exit": "ended with code 0 before the others finished",
}


def test_restarts_after_every_kind_of_death(undisturbed, tmp_path):
    """Row 21 first: it dies at one step until the launcher gives up, before there is a checkpoint."""
    deaths = [("kill", 0, 6), ("abort", 1, 9), ("segv", 0, 12), ("exit", 1, 15)]
    faults = [Fault(kind=kind, rank=rank, step=step) for kind, rank, step in deaths]
    run = UnderFaults(tmp_path, [Fault(kind="kill", rank=1, step=3, times=3), *faults])
    _, ended = run.launch_until_done((75, "not restarted: 2 restarts made no newer checkpoint"), (0, ""), restarts=2)
    assert run.causes() == [(1, ENDINGS["kill"], 75)] * 3 + [(rank, ENDINGS[kind], 75) for kind, rank, _ in deaths]
    for kind, rank, _ in deaths:
        assert ended.stderr.count(f"rank {rank} failed first: {ENDINGS[kind]} (exit code 75)") == 1
    assert max(run.detected()) < DEAD + ROOM
    assert_same(run, undisturbed(2))


def test_skipped_step_restarts_and_exception_does_not(undisturbed, tmp_path):
    """Rows 6 and 4: of two ranks, the one with too few updates is named; a traceback precedes the last line."""
    faults = [Fault(kind="skip", rank=1, step=6), Fault(kind="raise", rank=1, step=14)]
    run = UnderFaults(tmp_path, faults, timeouts={"rendezvous": 60, "heartbeat": 60, "step": DEADLINE})
    ended, _ = run.launch_until_done((1, "Step 6: the state of rank 1 has had 5 updates"), (0, ""), restarts=3)
    assert run.causes() == [(1, "exit code 75", 75), (1, "exit code 1", 1)], ended.stderr
    before, _, after = ended.stderr.rpartition("spmdkit launch: rank 1 failed first: exit code 1.")
    said = before.rpartition("spmdkit launch:")[2]
    assert "Traceback (most recent call last)" in said
    assert "InjectedFault: injected: raise on rank 1, step of step 14" in said
    assert after.count("\n") == 1, "nothing comes after that line"
    assert max(run.detected()) < DEADLINE + 10 + ROOM
    assert_same(run, undisturbed(2))


def test_process_dies_outside_of_steps(undisturbed, tmp_path):
    """Row 22 among them: a failure during recovery counts as one, and the run still recovers."""
    phases = [Fault(kind="kill", rank=1, phase=phase) for phase in ("compile", "restore", "finish")]
    run = UnderFaults(tmp_path, [Fault(kind="kill", rank=0, step=11), *phases])  # step 4 is complete for sure
    ended = run.launch(restarts=3)
    assert ended.code == 0, ended.stderr
    assert [rank for rank, _, _ in run.causes()] == [1, 0, 1, 1], ended.stderr
    assert [each["phase"] for each in run.journal.events("fault")] == ["compile", "step", "restore", "finish"]
    assert_same(run, undisturbed(2))
