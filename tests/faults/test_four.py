"""The rows of the failure matrix that other files hold with two processes, with four.

[test_death.py, test_stalls.py, test_saving.py and test_elastic.py](.) have four processes of their own.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from matrix import DEAD, DEADLINE, DEVICES, ROOM, STEPS, UnderFaults, assert_same, small
from ranks import start, wait
from runs import metrics

from spmdkit.testing import Fault

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]
TIMEOUTS = {"rendezvous": 60, "heartbeat": 60, "step": DEADLINE}


class Row(NamedTuple):
    """What happens to four processes, and what is seen of it.

    Attributes:
        faults: What is injected.
        codes: How each launch ends, the same command again and again; the last finishes the run.
        says: A pattern that the first of them prints.
        restarts: Of each launch.
        sections: Of the config.
        bound: Seconds within which all processes of a broken attempt have ended.
    """

    faults: tuple[Fault, ...]
    codes: tuple[int, ...]
    says: str
    restarts: int = 0
    sections: Mapping[str, Any] = {}
    bound: float = DEAD


def stopped(phase: str, rank: int, step: int | None) -> Row:
    """A signal to one rank in a phase."""
    says = rf"Stopped by SIGTERM to rank {rank} after step \d+ of {STEPS}"
    return Row((Fault(kind="signal", rank=rank, phase=phase, step=step),), (75, 0), says)


def killed_after(fault: Fault) -> tuple[Fault, ...]:
    """A fault that only the next attempt meets."""
    return fault, Fault(kind="kill", rank=2, step=(fault.step or 0) + 1)


def damaged(how: str, says: str) -> Row:
    """A checkpoint that is damaged before all start again."""
    return Row(killed_after(Fault(kind="damage", rank=0, step=13, how=how)), (0,), says, restarts=2)


ROWS = {
    "4 an exception": Row(
        (Fault(kind="raise", rank=2, step=7),), (1, 0), r"InjectedFault[\s\S]*rank 2 failed first: exit code 1"
    ),
    "6 a step left out": Row(
        (Fault(kind="skip", rank=3, step=6),),
        (0,),
        r"rank 3 failed first|not in the same place|hold other bits",
        restarts=2,
        sections={"timeouts": TIMEOUTS, "guards": {"replicas_every": 4}},
        bound=DEADLINE + 10,
    ),
    "7 a signal in compilation": stopped("compile", 1, None),
    "7 a signal in the reader": stopped("read", 3, 9),
    "7 a signal in the wait for data": stopped("data", 2, 6),
    "7 a signal in a step": stopped("step", 3, 7),
    "7 a signal in an evaluation": stopped("evaluation", 0, 8),
    "7 a signal in a save": stopped("save", 2, 4),
    "8 a second signal": Row(
        (Fault(kind="signal", rank=2, step=7, signals=("SIGTERM", "SIGTERM"), seconds=0.1),),
        (75, 0),
        r"\[2\] ended by SIGTERM; the same command goes on",
    ),
    "8 a kill after a signal": Row(
        (Fault(kind="signal", rank=2, step=7, signals=("SIGTERM", "SIGKILL"), seconds=0.1),),
        (75, 0),
        "rank 2 failed first: killed by SIGKILL",
    ),
    "11 a checkpoint cut": damaged("truncate", "is damaged: "),
    "11 a checkpoint without a description": damaged("metadata", "is damaged: "),
    "12 a flipped bit in a checkpoint": damaged("flip", "is damaged: "),
    "13 a full disk": Row(
        (Fault(kind="raise", rank=0, phase="save:metadata", step=8, error="ENOSPC"),),
        (75, 0),
        "No space left on device",
    ),
    "14 a slow disk": Row((Fault(kind="pause", rank=1, phase="save:arrays", step=8, seconds=3.0),), (0,), ""),
    "16 a reader that fails": Row(
        (Fault(kind="raise", rank=3, phase="read", step=9, error="EIO"),),
        (75, 0),
        r"Input/output error[\s\S]*rank 3 failed first",
    ),
    "17 a value that is not a number": Row(
        (Fault(kind="nan", rank=1, phase="batch", step=7),), (3, 0), "error: Step 7: the loss is nan"
    ),
    "18 a flipped bit in a copy": Row(
        (Fault(kind="flip", rank=3, step=7),),
        (0,),
        r"devices that hold copies of the same array hold other bits:[\s\S]* \(rank 3\) has other bits",
        restarts=1,
        sections={"guards": {"replicas_every": 5}},
    ),
    "19 a slow rank": Row(
        (Fault(kind="slow", rank=2, phase="data", step=2, seconds=0.5),),
        (0,),
        "warning: rank 2 holds every step up",
        sections={"guards": {"straggler_steps": 5}},
    ),
    "20 no memory": Row(
        (Fault(kind="raise", rank=2, step=7, error="ENOMEM"),), (75, 0), "not enough memory|Cannot allocate memory"
    ),
    "21 it dies again and again": Row(
        (Fault(kind="kill", rank=3, step=3, times=3),), (75, 0), "2 restarts made no newer checkpoint", restarts=2
    ),
    "22 a death in the restore": Row(
        (Fault(kind="kill", rank=0, step=11), Fault(kind="kill", rank=2, phase="restore")),
        (0,),
        "rank 2 failed first: killed by SIGKILL",
        restarts=3,
    ),
    "25 a rank that comes late": Row((Fault(kind="pause", rank=3, phase="start", seconds=6.0),), (0,), ""),
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name, undisturbed, tmp_path):
    row = ROWS[name]
    run = UnderFaults(tmp_path, row.faults, 4, **row.sections)
    launches = [run.launch(restarts=row.restarts) for _ in row.codes]
    said = [each.stdout + each.stderr for each in launches]
    assert tuple(each.code for each in launches) == row.codes, said
    assert re.search(row.says, said[0]), said[0]
    assert max(run.detected(), default=0.0) < row.bound + ROOM
    assert_same(run, undisturbed(4))


def test_two_jobs_in_one_folder(undisturbed, tmp_path):
    """Row 15: the second is refused while the first trains, and changes nothing."""
    slow = Fault(kind="slow", rank=0, phase="data", step=5, seconds=0.5)
    first = UnderFaults(tmp_path, [slow], 4)
    with first.started() as run:
        run.wait_for_step(5)
        second = UnderFaults(tmp_path, [], 4).launch()
        ended = run.wait(280)
    assert second.code == 2
    assert re.search(r"belongs to another job|is in use", second.stderr), second.stderr
    assert ended.code == 0, ended.stderr
    assert_same(first, undisturbed(4))


def test_another_config_afterwards(undisturbed, tmp_path):
    """Row 23: what makes another run is refused; the run is as it was, and goes on."""
    run = UnderFaults(tmp_path, [Fault(kind="signal", rank=1, step=7)], 4)
    assert run.launch().code == 75
    before = metrics(run.folder)
    refused = run.launch(overrides=["run.seed=7"])
    assert refused.code == 2
    assert "run.seed: 0" in refused.stderr
    assert metrics(run.folder) == before
    assert run.launch().code == 0
    assert_same(run, undisturbed(4))


def test_another_config_on_one_rank(tmp_path):
    """Row 24."""
    config = small(tmp_path, 4)
    for each in wait(start(config, [[], [], ["optimizer.learning_rate=0.02"], []], devices=DEVICES)):
        assert each.code == 2, each.stderr
        assert "The 4 processes of this run differ" in each.stderr
        assert re.search(r"optimizer.learning_rate: \S+ on ranks 0, 1 and 3, 0.02 on rank 2", each.stderr), each.stderr
    assert not (tmp_path / "run").exists(), "nothing was trained, nothing was written"
