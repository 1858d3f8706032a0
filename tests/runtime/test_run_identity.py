"""A run and its identity: what carries it, and checkpoints of another run with the same shapes in its directory."""

import json
import shutil

import pytest
import yaml
from spmdkit.checkpoints.identity import ForeignRun, Identity, read_identity
from spmdkit.checkpoints.restore import StoredCheckpoint
from spmdkit.runtime import ownership, run_directory
from spmdkit.runtime.loading.load_run import load_run
from spmdkit.runtime.run_directory import identify_run, identity_remarks
from support.runs import leave_run, losses, train, unchanged, write_config

OURS, OTHER = "5f0c1d2e3a4b5c6d", "9ac17be0d1f2a3b4"
SHORT = {
    "optimizer": {"learning_rate": 0.01},
    "train": {"steps": 12, "global_batch": 16},
    "eval": {"every": 0, "batches": 1},
}


def raw_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """The directories of a run of steps 4 and 8, and of another one with the same shapes."""
    config = write_config(tmp_path_factory.mktemp("runs"), **SHORT)
    other = leave_run(config, f"run.dir={config.parent}/other", steps=(8,), run=OTHER)
    return leave_run(config, steps=(4, 8), run=OURS), other


@pytest.fixture
def mixed(two_runs, tmp_path):
    """The config of a run whose directory holds its step 4, and step 8 of another run."""
    ours, other = two_runs
    shutil.copytree(ours / "checkpoints" / "4", tmp_path / "run" / "checkpoints" / "4")
    shutil.copytree(other / "checkpoints" / "8", tmp_path / "run" / "checkpoints" / "8")
    text = (ours / "config.yaml").read_text().partition("\n")[2]
    (tmp_path / "run" / "config.yaml").write_text(Identity(OURS, str(tmp_path / "run")).header() + text)
    return write_config(tmp_path, **SHORT)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "{folder}/tiny.yaml"],
        ["train", "{folder}/run"],
        ["train", "{folder}/tiny.yaml", "run.dir={folder}/new", "checkpoint.start_from={folder}/run"],
        ["evaluate", "{folder}/run"],
        ["evaluate", "{folder}/tiny.yaml"],
        ["export", "{folder}/run", "{folder}/out"],
        ["export", "{folder}/run/checkpoints/8", "{folder}/out"],
    ],
    ids=" ".join,
)
def test_a_checkpoint_of_another_run_is_refused(words, mixed, cli):
    folder = mixed.parent
    with unchanged(folder):
        error = cli(2, *(word.format(folder=folder) for word in words)).err
    assert f"{folder}/run/checkpoints/8 is of another run: it carries the identity {OTHER}, and " in error
    assert f"{folder}/run/config.yaml carries {OURS}." in error


def test_load_run_refuses_a_checkpoint_of_another_run(mixed):
    with pytest.raises(ForeignRun, match=f"8 is of another run: it carries the identity {OTHER}"):
        load_run(mixed.parent / "run")
    assert load_run(mixed.parent / "run", step=4).step == 4


def test_metrics_of_another_run_are_refused(tmp_path, cli):
    config = write_config(tmp_path, **SHORT)
    folder = leave_run(config, run=OURS)
    (folder / "metrics.jsonl").write_text(f'{{"step": 4, "loss": 2.5, "run": "{OTHER}"}}\n')
    with unchanged(folder):
        assert f"metrics.jsonl is of another run: it carries the identity {OTHER}" in cli(2, "train", config).err


@pytest.mark.slow
def test_a_run_continues_without_the_checkpoint_of_another(mixed):
    folder = mixed.parent / "run"
    (folder / "checkpoints" / "8").rename(mixed.parent / "8")
    train(mixed)
    assert [*losses(folder)] == [*range(5, 13)]
    assert StoredCheckpoint(folder / "checkpoints" / "12").run == OURS


@pytest.mark.slow
def test_everything_that_a_run_writes_carries_its_identity(tmp_path, monkeypatch):
    config = write_config(tmp_path, **SHORT)
    folder = tmp_path / "run"
    owners = []
    check = ownership.Ownership.check
    monkeypatch.setattr(
        ownership.Ownership, "check", lambda self: owners.append(ownership.read_owner(folder)) or check(self)
    )
    train(config, "train.steps=4")
    identity = read_identity(folder)
    assert identity.directory == str(folder)
    train(config, "train.steps=8")
    assert read_identity(folder) == identity
    runs = {StoredCheckpoint(folder / "checkpoints" / step).run for step in ("4", "8")}
    assert runs | {owner.run for owner in owners} | {each["run"] for each in raw_metrics(folder)} == {identity.run}
    train(config, "train.steps=4", "--fresh")
    assert read_identity(folder).run != identity.run
    assert read_identity(tmp_path / "run.old-1") == identity


@pytest.mark.slow
def test_a_run_of_an_earlier_version_gets_an_identity(tmp_path, capsys):
    config = write_config(tmp_path, **SHORT)
    folder = leave_run(config, steps=(4,))
    train(config, "train.steps=8")
    identity = read_identity(folder)
    assert identity.run
    assert [StoredCheckpoint(folder / "checkpoints" / step).run for step in ("4", "8")] == ["", identity.run]
    assert "identity" not in capsys.readouterr().out
    shutil.rmtree(folder / "checkpoints" / "8")
    train(config, "train.steps=6")
    assert "The checkpoint of step 4 carries no identity: it cannot be compared" in capsys.readouterr().out
    assert read_identity(folder) == identity


@pytest.mark.slow
def test_a_copied_directory_continues_as_a_run_of_its_own(tmp_path, cli):
    """Both go on; what one of them saves later is not taken for the other's."""
    config = write_config(tmp_path, **SHORT)
    original = leave_run(config, steps=(4, 8), run=OURS)
    copy = shutil.copytree(original, tmp_path / "copy")
    other = ("optimizer.learning_rate=0.02", "checkpoint.every=2")
    said = cli(0, "train", copy, *other).out
    assert f"{copy} is a copy of the run in {original} and goes on as a run of its own from step 8: " in said
    identity = read_identity(copy)
    assert identity.origins == {OURS: 8}
    assert "copy of the run" not in cli(0, "train", copy, *other, "train.steps=14").out
    assert read_identity(copy) == identity
    assert {each["run"] for each in raw_metrics(copy)} == {identity.run}
    assert yaml.safe_load((copy / "config.yaml").read_text())["optimizer"]["learning_rate"] == 0.02
    train(config, "train.steps=16")
    assert read_identity(original).run == OURS
    shutil.copytree(original / "checkpoints" / "16", copy / "checkpoints" / "16")
    assert f"run {OURS}, from which this one was copied at step 8, went on" in cli(2, "train", copy, *other).err


def test_processes_take_the_identity_from_process_0(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(run_directory, "broadcast_text", lambda name, text, seconds: sent.append(text) or text)
    identity = identify_run(tmp_path, 1.0)
    monkeypatch.setattr(run_directory, "is_main_process", lambda: False)
    monkeypatch.setattr(run_directory, "broadcast_text", lambda name, text, seconds: sent[0])
    assert identify_run(tmp_path, 1.0) == identity
    assert identity[1:] == (str(tmp_path), {})


def test_remarks_need_an_identity(tmp_path):
    assert identity_remarks(tmp_path, Identity(OURS), 4) == []
    (tmp_path / "config.yaml").write_text("train: {}\n")
    assert identity_remarks(tmp_path, Identity(OURS), 4) == []
