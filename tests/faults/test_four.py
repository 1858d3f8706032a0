"""Rows of the failure matrix with four processes; faults that end a launch follow each other in one run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from support.faults import Fault
from support.matrix import DEAD, DEADLINE, ROOM, STEPS, UnderFaults, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(900)]
TIMEOUTS = {"rendezvous": 60, "heartbeat": 60, "step": DEADLINE}


class Case(NamedTuple):
    """Faults of one run of four processes; the exit code and output of each launch of the same command."""

    faults: tuple[Fault, ...]
    launches: tuple[tuple[int, str], ...]
    restarts: int = 0
    sections: Mapping[str, Any] = {}
    bound: float = DEAD
    """Seconds within which all processes of a broken attempt have ended."""


CASES = {
    "4, 8, 13, 16, 17 and 20 errors and second signals": Case(
        (
            Fault(kind="raise", rank=3, phase="read", step=1, error="EIO"),  # rank 2 does not reach step 3
            Fault(kind="raise", rank=2, step=3),
            Fault(kind="raise", rank=2, step=4, error="ENOMEM"),
            Fault(kind="signal", rank=2, step=5, signals=("SIGTERM", "SIGTERM"), seconds=0.1),
            Fault(kind="signal", rank=2, step=6, signals=("SIGTERM", "SIGKILL"), seconds=0.1),
            Fault(kind="raise", rank=0, phase="save:metadata", step=8, error="ENOSPC"),  # found at the next save
            Fault(kind="nan", rank=1, phase="batch", step=13),
        ),
        (
            (75, r"Input/output error[\s\S]*rank 3 failed first"),
            (1, r"InjectedFault[\s\S]*rank 2 failed first: exit code 1"),
            (75, "not enough memory|Cannot allocate memory"),
            (75, r"\[2\] ended by SIGTERM; the same command resumes"),
            (75, "rank 2 failed first: killed by SIGKILL"),
            (75, "No space left on device"),
            (3, "error: Step 13: the loss is nan"),
            (0, ""),
        ),
    ),
    "6 a step left out, 18 a flipped bit in a copy": Case(
        (Fault(kind="skip", rank=3, step=6), Fault(kind="flip", rank=3, step=10)),
        (
            (75, r"rank 3 failed first|not in the same place|hold other bits"),
            (75, r"devices that hold copies of the same array hold other bits:[\s\S]* \(rank 3\) has other bits"),
            (0, ""),
        ),
        sections={"timeouts": TIMEOUTS, "guards": {"replicas_every": 4}},
        bound=DEADLINE + 10,
    ),
    "7 signals": Case(
        (Fault(kind="signal", rank=1, phase="compile"), Fault(kind="signal", rank=3, step=7)),
        (
            (75, f"Stopped by SIGTERM to rank 1 after step 0 of {STEPS}"),
            (75, rf"Stopped by SIGTERM to rank 3 after step \d+ of {STEPS}"),
            (0, ""),
        ),
    ),
    "11 and 12 damaged checkpoints": Case(
        (
            Fault(kind="pause", step=10),  # until the checkpoint of step 8 is complete
            Fault(kind="damage", step=11, how="truncate"),
            Fault(kind="kill", step=11),
            Fault(kind="pause", step=14),
            Fault(kind="damage", step=15, how="flip"),
            Fault(kind="kill", step=15),
        ),
        ((75, "killed by SIGKILL"), (75, "is damaged: "), (0, "is damaged: ")),
    ),
    "14 a slow disk, 19 a slow rank, 25 a rank that comes late": Case(
        (
            Fault(kind="pause", rank=3, phase="start", seconds=6.0),
            Fault(kind="slow", rank=2, phase="data", step=2, seconds=0.5),
            Fault(kind="pause", rank=1, phase="save:arrays", step=8, seconds=3.0),
        ),
        ((0, "warning: rank 2 delays every step"),),
        sections={"guards": {"straggler_steps": 5}},
    ),
    "1 to 3 deaths, 21 again and again, 22 in the restore": Case(
        (
            Fault(kind="kill", rank=3, step=3, times=3),
            Fault(kind="kill", rank=0, step=11),
            Fault(kind="kill", rank=2, phase="restore"),
            Fault(kind="exit", rank=2, step=14),
        ),
        (
            (75, r"rank 3 failed first: killed by SIGKILL[\s\S]*2 restarts made no newer checkpoint"),
            (
                0,
                r"rank 0 failed first: killed by SIGKILL[\s\S]*rank 2 failed first: killed by SIGKILL"
                r"[\s\S]*rank 2 failed first: ended with code 0 before the others finished",
            ),
        ),
        restarts=2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_failure_matrix_rows(name, undisturbed, tmp_path):
    case = CASES[name]
    run = UnderFaults(tmp_path, case.faults, 4, **case.sections)
    run.launch_until_done(*case.launches, restarts=case.restarts)
    assert len(run.journal.events("fault")) == sum(fault.times for fault in case.faults)
    assert max(run.detected(), default=0.0) < case.bound + ROOM
    assert_same(run, undisturbed(4))
