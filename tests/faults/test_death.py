"""A process that dies, in every way and on every rank: noticed, named, and as if it had not been (rows 1 to 4)."""

import pytest
from matrix import DEAD, ROOM, UnderFaults, assert_same

from spmdkit.testing import Fault

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]
ROUNDS = (3, 7, 14)
"""The steps before which it dies, in attempts one after the other."""
ENDINGS = {
    "kill": "killed by SIGKILL",
    "abort": "killed by SIGABRT",
    "segv": "killed by SIGSEGV",
    "exit": "ended with code 0 before the others were done",
}


def dies(kind: str, rank: int, folder, processes: int, rounds=ROUNDS, phase: str = "step") -> UnderFaults:
    faults = [Fault(kind=kind, rank=rank, step=step, phase=phase) for step in rounds]
    return UnderFaults(folder, faults, processes)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ENDINGS)
def test_of_two(kind, rank, undisturbed, tmp_path):
    run = dies(kind, rank, tmp_path, 2)
    ended = run.launch(restarts=3)
    assert ended.code == 0, ended.stderr
    assert run.causes() == [(rank, ENDINGS[kind], 75)] * len(ROUNDS), ended.stderr
    assert ended.stderr.count(f"rank {rank} failed first: {ENDINGS[kind]} (exit code 75)") == len(ROUNDS)
    assert max(run.detected()) < DEAD + ROOM
    assert_same(run, undisturbed(2))


@pytest.mark.parametrize(("kind", "rank"), [("kill", 0), ("kill", 2), ("kill", 3), ("abort", 1), ("exit", 2)])
def test_of_four(kind, rank, undisturbed, tmp_path):
    run = dies(kind, rank, tmp_path, 4, rounds=(6,))
    ended = run.launch(restarts=2)
    assert ended.code == 0, ended.stderr
    assert run.causes() == [(rank, ENDINGS[kind], 75)], ended.stderr
    assert max(run.detected()) < DEAD + ROOM
    assert_same(run, undisturbed(4))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_of_one(rank, undisturbed, tmp_path):
    """No restart mends an error that nobody foresaw: code 1, and its traceback stands before the last line."""
    run = dies("raise", rank, tmp_path, 2)
    for number, step in enumerate(ROUNDS, 1):
        ended = run.launch(restarts=3)
        assert ended.code == 1, ended.stderr
        assert run.causes() == [(rank, "exit code 1", 1)] * number, ended.stderr
        before, _, after = ended.stderr.rpartition(f"spmdkit launch: rank {rank} failed first: exit code 1.")
        words = before.rpartition("spmdkit launch:")[2]
        assert "Traceback (most recent call last)" in words
        assert f"InjectedFault: injected: raise on rank {rank}, step of step {step}" in words
        assert after.count("\n") == 1, "nothing comes after that line"
    assert max(run.detected()) < DEAD + ROOM
    assert run.launch().code == 0
    assert_same(run, undisturbed(2))


@pytest.mark.parametrize("phase", ["compile", "restore", "finish"])
@pytest.mark.parametrize("kind", ["kill", "abort"])
def test_outside_of_the_steps(kind, phase, undisturbed, tmp_path):
    """Row 22 among them: a failure during recovery counts as one, and the run still recovers."""
    first = [Fault(kind="kill", rank=0, step=11)] if phase == "restore" else []  # step 4 is complete for sure
    run = UnderFaults(tmp_path, [*first, Fault(kind=kind, rank=1, phase=phase)])
    ended = run.launch(restarts=3)
    assert ended.code == 0, ended.stderr
    assert run.causes()[-1] == (1, ENDINGS[kind], 75), ended.stderr
    assert len(run.causes()) == len(first) + 1
    assert_same(run, undisturbed(2))
