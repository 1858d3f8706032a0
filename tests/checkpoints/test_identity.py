"""The identity of a run, and checkpoints and metrics of another run in its directory."""

import errno
import shutil
from pathlib import Path

import pytest
from spmdkit.checkpoints.checksums import read_description
from spmdkit.checkpoints.damage import SaveFailed
from spmdkit.checkpoints.directory import find
from spmdkit.checkpoints.identity import (
    ForeignRun,
    Identity,
    check_records,
    continue_identity,
    new_identity,
    read_identity,
)
from spmdkit.checkpoints.inspect import inspect, text
from spmdkit.checkpoints.integrity import summary, verify
from spmdkit.checkpoints.restore import StoredCheckpoint
from spmdkit.launch.cli import main
from support.checkpoint_states import ABOUT, opened, run_state, write

OURS, OTHER = "5f0c1d2e3a4b5c6d", "9ac17be0d1f2a3b4"


def write_run(folder, run: str, *steps: int, header: str | None = None):
    """Leaves checkpoints of a run and the first lines of its config; gives its directory."""
    write(folder, *map(run_state, steps), about={**ABOUT, "run": run} if run else ABOUT)
    header = Identity(run, str(folder)).header() if header is None and run else header or ""
    (folder / "config.yaml").write_text(f"{header}train: {{}}\n")
    return folder


def test_a_new_run_has_another_identity(tmp_path):
    assert new_identity(tmp_path).run != new_identity(tmp_path).run


@pytest.mark.parametrize(
    ("identity", "found"),
    [
        (Identity(OURS), Identity(OURS)),
        (Identity(OURS, "/runs/a b"), Identity(OURS, "/runs/a b")),
        (Identity(OURS, "/runs/a", {OTHER: 40}), Identity(OURS, "/runs/a", {OTHER: 40})),
        (Identity(OURS, "/runs/a\nb"), Identity(OURS)),
    ],
)
def test_the_config_carries_the_identity(identity, found, tmp_path):
    (tmp_path / "config.yaml").write_text(f"{identity.header()}# a comment\ntrain: {{}}\n# run {OTHER}\n")
    assert read_identity(tmp_path) == found


def test_a_directory_without_a_config_has_no_identity(tmp_path):
    assert read_identity(tmp_path) is None
    assert read_identity(tmp_path / "missing") is None


@pytest.fixture
def mixed(tmp_path):
    """The directory of a run with its checkpoint of step 10, and that of step 20 of another run."""
    other = write_run(tmp_path / "other", OTHER, 20)
    folder = write_run(tmp_path / "run", OURS, 10)
    shutil.copytree(other / "checkpoints" / "20", folder / "checkpoints" / "20")
    return folder


def test_a_checkpoint_of_another_run_is_not_opened(mixed):
    with pytest.raises(ForeignRun) as raised:
        StoredCheckpoint(mixed / "checkpoints" / "20")
    assert raised.value.exit_code == 2
    message = f"{mixed}/checkpoints/20 is of another run: it carries the identity {OTHER}, and {mixed}/config.yaml"
    assert f"{message} carries {OURS}. Move it out of {mixed}/checkpoints" in str(raised.value)
    assert StoredCheckpoint(mixed / "checkpoints" / "10").run == OURS


def test_a_checkpoint_of_another_run_is_not_restored(mixed):
    with opened(mixed / "checkpoints", run_state(0)) as checkpoints:
        for action in (checkpoints.check_fits, checkpoints.restore, lambda: checkpoints.restore_newest(1.0)):
            with pytest.raises(ForeignRun, match="20 is of another run"):
                action()
        assert int(checkpoints.restore(10).step) == 10


def test_inspect_and_verify_name_a_checkpoint_of_another_run(mixed):
    found = inspect(find(str(mixed)))
    assert [bool(line["problem"]) for line in found["steps"]] == [False, True]
    assert found["newest"]["step"] == 10
    assert f"  of another run: it carries the identity {OTHER}" in text(found)
    chosen = inspect(find(str(mixed), 20))
    assert chosen["run"] == OTHER
    assert f"  saved by the run {OTHER}\n  The checkpoint {mixed}/checkpoints/20 is of another run" in text(chosen)
    verdicts = list(verify(find(str(mixed))))
    assert [verdict.is_whole for verdict in verdicts] == [True, False]
    assert "/20: OF ANOTHER RUN\n" in str(verdicts[1])
    assert summary(verdicts).startswith("1 of 2 checkpoints of another run: 20.")
    assert main(["checkpoint", "verify", str(mixed)]) == 2


@pytest.mark.parametrize(("run", "header"), [("", ""), ("", Identity(OURS).header()), (OURS, None)])
def test_directories_of_earlier_versions_can_be_opened(run, header, tmp_path):
    """Without an identity, or with one since a later start."""
    folder = write_run(tmp_path / "run", run, 10, header=header)
    assert StoredCheckpoint(folder / "checkpoints" / "10").run == run


def test_a_checkpoint_without_its_run_can_be_opened(mixed, tmp_path):
    (mixed / "config.yaml").unlink()
    assert StoredCheckpoint(mixed / "checkpoints" / "20").run == OTHER
    shutil.copytree(mixed / "checkpoints" / "20", tmp_path / "20")
    assert StoredCheckpoint(tmp_path / "20").run == OTHER


def test_a_config_without_its_first_line_is_named(tmp_path):
    folder = write_run(tmp_path / "run", OURS, 10, header="")
    with pytest.raises(ForeignRun, match=f"write '# run {OURS}' as the first line of config.yaml; otherwise move it"):
        StoredCheckpoint(folder / "checkpoints" / "10")
    (folder / "config.yaml").write_text(f"# run {OURS}\ntrain: {{}}\n")
    StoredCheckpoint(folder / "checkpoints" / "10")


def test_a_moved_run_stays_the_same(tmp_path):
    folder = write_run(tmp_path / "run", OURS, 10)
    moved = folder.rename(tmp_path / "moved")
    assert continue_identity(moved) == Identity(OURS, str(moved))
    link = tmp_path / "link"
    link.symlink_to(moved)
    (moved / "config.yaml").write_text(f"{Identity(OURS, str(moved)).header()}train: {{}}\n")
    assert continue_identity(link).run == OURS


def test_a_copied_run_becomes_its_own_when_it_continues(tmp_path):
    original = write_run(tmp_path / "run", OURS, 10)
    copy = shutil.copytree(original, tmp_path / "copy")
    StoredCheckpoint(copy / "checkpoints" / "10")
    identity = continue_identity(copy)
    assert identity.run != OURS
    assert identity[1:] == (str(copy), {OURS: 10})
    (copy / "config.yaml").write_text(f"{identity.header()}train: {{}}\n")
    assert continue_identity(copy) == identity
    StoredCheckpoint(copy / "checkpoints" / "10")
    write_run(original, OURS, 20)
    shutil.copytree(original / "checkpoints" / "20", copy / "checkpoints" / "20")
    with pytest.raises(ForeignRun, match=f"run {OURS}, from which this one was copied at step 10, went on and saved"):
        StoredCheckpoint(copy / "checkpoints" / "20")


def test_a_copy_of_a_directory_that_cannot_be_read_stays_the_same(tmp_path):
    original = write_run(tmp_path / "run", OURS, 10)
    copy = shutil.copytree(original, tmp_path / "copy")
    (original / "config.yaml").unlink()
    (original / "config.yaml").mkdir()
    assert continue_identity(copy) == Identity(OURS, str(copy))


def test_a_copy_of_a_copy_keeps_both_origins(tmp_path):
    folder = write_run(tmp_path / "run", OURS, 10, header=Identity(OURS, str(tmp_path / "run"), {OTHER: 5}).header())
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert continue_identity(copy).origins == {OTHER: 5, OURS: 10}


def test_metrics_of_another_run_are_named(tmp_path):
    folder = write_run(tmp_path / "run", OURS, 10)
    path = folder / "metrics.jsonl"
    ours, other = ({"step": 10, "loss": 1.0, "run": run} for run in (OURS, OTHER))
    check_records(path, [{"step": 5, "loss": 2.0}, ours])
    check_records(path, [{**other, "step": 11}])  # the next start drops it
    with pytest.raises(ForeignRun, match=f"metrics.jsonl is of another run: it carries the identity {OTHER}, and "):
        check_records(path, [ours, other])


def test_checkpoints_of_two_python_programs_are_not_mixed(tmp_path):
    """Each directory has a series of its own, which later programs in it continue."""
    for name, steps in (("one", (10, 20)), ("two", (30,))):
        write(tmp_path / name, *map(run_state, steps), about=None)
    folder = tmp_path / "one" / "checkpoints"
    series = [read_description(path)["series"] for path in (folder / "10", folder / "20")]
    assert series[0] == series[1]
    write(tmp_path / "one", run_state(25), about=None)
    with opened(folder, run_state(0)) as checkpoints:
        assert int(checkpoints.restore().step) == 25
        shutil.copytree(tmp_path / "two" / "checkpoints" / "30", folder / "30")
        for action in (checkpoints.restore, lambda: checkpoints.restore_newest(1.0)):
            with pytest.raises(ForeignRun, match="several trainings") as raised:
                action()
        assert raised.value.exit_code == 2
        assert f"  steps 10, 20, 25: series {series[0]}\n  steps 30: series " in str(raised.value)
        (folder / "30").rename(tmp_path / "30")
        assert int(checkpoints.restore().step) == 25


def test_a_python_program_goes_on_beside_a_config_of_its_own(tmp_path):
    folder = write(tmp_path / "run", run_state(10), about=None)
    (folder / "config.yaml").write_text("learning_rate: 0.1\n")
    with opened(folder / "checkpoints", run_state(0)) as checkpoints:
        assert int(checkpoints.restore().step) == 10


def test_a_damaged_checkpoint_belongs_to_no_series(tmp_path):
    folder = write(tmp_path / "run", run_state(10), run_state(20), about=None)
    (folder / "checkpoints" / "20" / "description.json").write_text("{")
    with opened(folder / "checkpoints", run_state(0)) as checkpoints:
        assert checkpoints.restore_newest(1.0).step == 10


def test_a_first_save_that_cannot_list_the_directory_has_failed(tmp_path, monkeypatch):
    """Its error is that of every failed save, which says what is complete and how to go on."""

    def fail(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    folder = write(tmp_path / "run", run_state(10), about=None)
    failure = pytest.raises(SaveFailed, match=r"Checkpoint of step 20 could not be written to .* Stale file handle")
    with failure, opened(folder / "checkpoints", run_state(0)) as checkpoints:
        monkeypatch.setattr(Path, "iterdir", fail)
        checkpoints.save(20, run_state(20))


def test_a_name_of_a_run_in_python_is_no_identity(tmp_path):
    """Such as the one of a tracker, which is another one after a restart."""
    for step, name in ((10, "wandb-a"), (20, "wandb-b"), (30, 7)):
        write(tmp_path / "run", run_state(step), about={"run": name})
    folder = tmp_path / "run"
    (folder / "config.yaml").write_text("learning_rate: 0.1\n")
    assert StoredCheckpoint(folder / "checkpoints" / "30").about["run"] == 7
    with opened(folder / "checkpoints", run_state(0)) as checkpoints:
        assert int(checkpoints.restore().step) == 30
