"""kill -9 in every phase of a save, on either rank: the step before restores, what is left over does no harm (row 10).

`test_kill.py` has the same in one process; `test_damage.py` what is damaged later (rows 11 and 12).
"""

import pytest
from matrix import STEPS, UnderFaults, assert_same

from spmdkit.testing import Fault

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults]
KEPT = {"every": 4, "keep": 1}
PHASES = ["save:folder", "save:arrays", "save:metadata", "save:commit", "save:removal"]


@pytest.mark.parametrize(("phase", "rank"), [*((phase, 0) for phase in PHASES), ("save", 1), ("save:arrays", 1)])
@pytest.mark.parametrize("processes", [2, 4])
def test_killed(phase, rank, processes, undisturbed, tmp_path):
    step = 4 if phase == "save:removal" else 8  # of the checkpoint that is removed
    run = UnderFaults(tmp_path, [Fault(kind="kill", rank=rank, phase=phase, step=step)], processes, checkpoint=KEPT)
    ended = run.launch()
    assert ended.code == 75, ended.stdout + ended.stderr
    assert run.causes() == [(rank, "killed by SIGKILL", 75)], ended.stderr
    with run.started() as again:
        left = again.checkpoints
        assert again.wait(280).code == 0
    assert set(left) <= {4, 8}
    assert left, "one is whole whenever it dies"
    folder = run.folder / "checkpoints"
    assert [each.name for each in folder.iterdir()] == [str(STEPS)], "nothing is left over"
    assert_same(run, undisturbed(processes))


@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "metadata", "empty"])
def test_damaged_while_it_trains(how, undisturbed, tmp_path):
    """Rows 11 and 12 in two processes: the newest is damaged, one of them dies; both go back one more.

    When the fourth save begins, the second is complete for sure, the third maybe.
    """
    moment = {"rank": 0, "phase": "save", "step": 16}
    faults = [Fault(kind="damage", how=how, **moment), Fault(kind="kill", **moment)]
    run = UnderFaults(tmp_path, faults)
    ended = run.launch(restarts=2)
    assert ended.code == 0, ended.stderr
    # Without a description, or without any file, it is no checkpoint to begin with.
    assert "Going back to the checkpoint before it." in ended.stdout or how in ("metadata", "empty")
    assert_same(run, undisturbed(2))


def test_slow_storage(undisturbed, tmp_path):
    """Row 14: a commit takes longer than the steps between two saves; the next save waits, nothing piles up."""
    fault = Fault(kind="pause", phase="save:commit", seconds=1.5, times=4)
    run = UnderFaults(tmp_path, [fault], checkpoint={"every": 2, "keep": 3})
    under_way = 0
    with run.started() as job:
        while job.launcher.poll() is None:
            unfinished = list((run.folder / "checkpoints").glob("*.orbax-checkpoint-tmp"))
            under_way = max(under_way, len(unfinished))
        assert job.wait().code == 0, job.output()
    assert under_way == 1
    assert_same(run, undisturbed(2))
