"""kill -9 in every phase of a save, on either rank: the step before restores, what is left over does no harm (row 10).

`test_kill.py` has the same in one process; `test_damage.py` what is damaged later (rows 11 and 12).
"""

import pytest
from support.faults import Fault
from support.matrix import STEPS, UnderFaults, assert_same
from support.runs import metrics, spmdkit, trained, write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(900)]
KEPT = {"every": 4, "keep": 1}


def assert_recovers(kills: list[tuple[str, int, int]], undisturbed, folder, processes: int) -> None:
    """Each launch is killed in the phase of a save that none was killed in before; the last one is not."""
    faults = [Fault(kind="kill", rank=rank, phase=phase, step=step) for phase, rank, step in kills]
    until_saved = Fault(kind="pause", rank=1, step=10, seconds=1.0, times=len(kills) + 1)  # before the save of step 12
    run = UnderFaults(folder, [*faults, until_saved], processes, checkpoint=KEPT)
    checkpoints = run.folder / "checkpoints"
    for number in range(1, len(kills) + 1):
        ended = run.launch()
        assert ended.code == 75, ended.stdout + ended.stderr
        died = [each["rank"] for each in run.journal.events("fault") if each["kind"] == "kill"]
        assert len(died) == number
        assert run.causes()[-1] == (died[-1], "killed by SIGKILL", 75), ended.stderr
        assert [each for each in checkpoints.iterdir() if each.name.isdecimal()], "one is whole whenever it dies"
    assert run.launch().code == 0
    assert [each.name for each in checkpoints.iterdir()] == [str(STEPS)], "nothing is left over"
    assert_same(run, undisturbed(processes))


def test_two_processes_killed_during_saves(undisturbed, tmp_path):
    phases = ["save:folder", "save:arrays", "save:metadata", "save:commit"]
    kills = [*((phase, 0, 8) for phase in phases), ("save:removal", 0, 4), ("save", 1, 16), ("save:arrays", 1, 16)]
    assert_recovers(kills, undisturbed, tmp_path, 2)


def test_four_processes_killed_during_saves(undisturbed, tmp_path):
    kills = [("save:metadata", 0, 8), ("save:commit", 0, 8), ("save:arrays", 3, 12)]
    assert_recovers(kills, undisturbed, tmp_path, 4)


@pytest.mark.parametrize("how", ["flip", "remove", "metadata"])
def test_checkpoint_damaged_during_training(how, undisturbed, tmp_path):
    """Rows 11 and 12 in two processes: the newest is damaged, one of them dies; both go back one more."""
    until_saved = Fault(kind="pause", step=15)  # or the save of step 12 could end after the damage
    moment = {"phase": "save", "step": 16}
    run = UnderFaults(tmp_path, [until_saved, Fault(kind="damage", how=how, **moment), Fault(kind="kill", **moment)])
    ended = run.launch(restarts=2)
    assert ended.code == 0, ended.stderr
    # Without a description, it is no checkpoint to begin with.
    assert "Going back to the checkpoint before it." in ended.stdout or how == "metadata"
    assert_same(run, undisturbed(2))


def test_survives_slow_storage(undisturbed, tmp_path):
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


def test_all_ranks_go_back_if_one_finds_damage(tmp_path):
    """Rank 1 alone reads the truncated files; the other one must not wait for it in a collective."""
    model = {"name": "mlp", "classes": 10, "widths": [256]}  # smaller shards are stored among the descriptions
    strategy = {"fsdp": {"size": 8, "floor_bytes": 64}}
    config = write_config(tmp_path, model=model, strategy=strategy, checkpoint={"every": 4, "keep": 3})
    launch = ["launch", config, "--on", "local:2x4"]
    trained(*launch, "train.steps=8")
    checkpoints = tmp_path / "run" / "checkpoints"
    files = [path for path in (checkpoints / "8/state/ocdbt.process_1").rglob("d/*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    ended = spmdkit(*launch, timeout=150)  # a barrier would wait for 20 minutes
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"Resuming {tmp_path / 'run'} at step 4 of 12." in ended.stdout
    assert (checkpoints / "damaged-8").is_dir()
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, 13))
