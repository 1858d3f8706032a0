"""Which folders a run may go on in."""

import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from spmdkit.checkpoints.identity import Identity
from spmdkit.configs import load_config
from spmdkit.configs.config_text import as_plain
from spmdkit.configs.schema import Config
from spmdkit.mesh.errors import UserError
from spmdkit.runtime import run_directory
from spmdkit.runtime.provenance import Provenance, read_provenance
from support.runs import listing, unchanged, write_config, write_language_config

MADE_OF = Provenance("abc", "text: 3 files")
OURS = Identity("5f0c1d2e3a4b5c6d")


def adopt_directory(config: Config, provenance: Provenance = MADE_OF, *, fresh: bool = False) -> Path:
    return run_directory.adopt_directory(config.run.dir, as_plain(config), provenance, 1.0, fresh=fresh)


def write_resolved(config: Config, folder: Path, provenance: Provenance = MADE_OF, *, fresh: bool = False) -> list[str]:
    return run_directory.write_config(config, folder, provenance, OURS, fresh=fresh)


@pytest.fixture
def config(tmp_path) -> Path:
    """The file of a run that has begun."""
    path = write_config(tmp_path)
    loaded = load_config(path)
    write_resolved(loaded, adopt_directory(loaded))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    return path


def test_the_whole_config_is_written(config):
    written = yaml.safe_load((config.parent / "run" / "config.yaml").read_text())
    assert written["train"]["remat"] == "none"
    assert written["model"] == {"name": "mlp", "check": "error", "features": 0, "classes": 10, "widths": [32]}
    assert sorted(path.name for path in (config.parent / "run").iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "provenance.json",
    ]


def test_every_kind_of_value_is_the_same_when_read_back(tmp_path):
    loaded = load_config(
        write_language_config(tmp_path),
        ["model.rope_base=1e4", "model.norm_epsilon=1e-6", "model.tied=true", "data.column='1e3'", "data.dtype=''"],
    )
    write_resolved(loaded, adopt_directory(loaded))
    (tmp_path / "run" / "checkpoints" / "4").mkdir(parents=True)
    adopt_directory(loaded)
    with pytest.raises(ValueError, match=r"data\.column: '1e3' there, 'text' here"):
        adopt_directory(load_config(tmp_path / "tiny.yaml"))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["strategy={data: 8}"],
        ["train.steps=99"],
        ["run.simulate=16", "strategy={data: 16}"],
        ["optimizer.learning_rate=0.5"],
        ["precision.compute=bfloat16"],
        ["data.layout={inputs: [[data, fsdp]]}"],
    ],
)
def test_a_run_goes_on_with_keys_that_may_change(config, overrides):
    with unchanged(config.parent):
        assert adopt_directory(load_config(config, overrides)) == config.parent / "run"


def test_what_may_not_is_listed_completely(config):
    changes = ["model.widths=[32, 32]", "data.eval_fraction=0.1", "data.shuffle=false", "train.global_batch=32"]
    changes += ["run.seed=1", "optimizer.name=lion", "precision.params=bfloat16", "train.steps=20"]
    with unchanged(config.parent), pytest.raises(ValueError, match="keys that a run cannot change") as info:
        adopt_directory(load_config(config, changes))
    lines = str(info.value).splitlines()
    run = config.parent / "run"
    assert lines[0] == f"This command differs from the run in {run} in keys that a run cannot change:"
    assert lines[1:8] == [
        "  data.eval_fraction: 0.05 there, 0.1 here (the position in the data is a number of batches in this order)",
        "  data.shuffle: True there, False here (the position in the data is a number of batches in this order)",
        "  model.widths: [32] there, [32, 32] here (the checkpoints contain the parameters of this model)",
        "  optimizer.name: 'adamw' there, 'lion' here (the checkpoints contain the state of this optimizer)",
        "  precision.params: 'float32' there, 'bfloat16' here (the checkpoints contain parameters of this dtype)",
        "  run.seed: 0 there, 1 here (it determines the order of the data and dropout)",
        "  train.global_batch: 16 there, 32 here (the position in the data is counted in batches of this size)",
    ]
    assert lines[8].startswith("Set these keys back to continue that run, or start anew: with another run.dir")
    assert f"checkpoint.start_from={run} begins with its parameters" in lines[8]


@pytest.mark.parametrize("is_main", [True, False])
def test_process_0_creates_and_takes_the_folder_for_all(is_main, tmp_path, monkeypatch):
    done, folder = [], tmp_path / "run"
    monkeypatch.setattr(run_directory, "is_main_process", lambda: is_main)
    monkeypatch.setattr(run_directory, "check_shared", lambda *given: done.append(given))
    run_directory.claim_directory(folder, SimpleNamespace(take=lambda: done.append(folder.is_dir())), 5.0)
    assert done == [*[True] * is_main, (folder, 5.0)]
    assert folder.exists() == is_main


def test_a_missing_config_is_told(config):
    (config.parent / "run" / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"holds a run, but its config\.yaml is missing\. Restore it, or start anew"):
        adopt_directory(load_config(config))


@pytest.mark.parametrize("left", [{}, {"checkpoints": None}, {"metrics.jsonl": b""}, {"provenance.json": b"{"}])
def test_a_folder_without_a_training_is_no_run_yet(left, tmp_path):
    """What a command that failed left behind stands in nobody's way."""
    loaded, folder = load_config(write_config(tmp_path)), tmp_path / "run"
    write_resolved(load_config(write_config(tmp_path), ["train.global_batch=32", "run.seed=1"]), folder)
    for name, content in left.items():
        (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)
    assert adopt_directory(loaded, MADE_OF) == folder
    assert write_resolved(loaded, folder, MADE_OF) == []
    assert yaml.safe_load((folder / "config.yaml").read_text())["run"]["seed"] == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"train: {steps: 3", "invalid YAML"),
        (b"\x00\xff\xfe binary", "it is not valid UTF-8"),
        (b"", "it is not a mapping of sections"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_damaged_config_is_told_and_kept(content, reason, begun, config):
    folder = config.parent / "run"
    (folder / "config.yaml").write_bytes(content)
    if not begun:
        (folder / "metrics.jsonl").unlink()
    with (
        unchanged(config.parent),
        pytest.raises(ValueError, match=f"config.yaml is not a valid config of a run: {reason}.*--fresh"),
    ):
        adopt_directory(load_config(config))
    adopt_directory(load_config(config), fresh=True)


@pytest.mark.parametrize("content", [b"garbage\n", b"notes of mine"])
def test_metrics_that_no_run_wrote_are_told_and_kept(content, config):
    (config.parent / "run" / "metrics.jsonl").write_bytes(content)
    with unchanged(config.parent), pytest.raises(ValueError, match="line 1 is not a JSON object"):
        adopt_directory(load_config(config))


@pytest.mark.parametrize("end", [b'{"step": 2, "lo', b"", b"\0\0\0\0"])
def test_metrics_cut_short_go_on(end, config):
    with (config.parent / "run" / "metrics.jsonl").open("ab") as file:
        file.write(end)
    adopt_directory(load_config(config))


def test_a_config_of_the_users_own_is_not_overwritten(tmp_path):
    """`run.dir` is the folder in which the user's config.yaml stands."""
    own = write_config(tmp_path).rename(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match=r"config\.yaml was not written by a run, .* Rename it, or set run\.dir to"):
        adopt_directory(load_config(own, [f"run.dir={tmp_path}"]))


@pytest.mark.parametrize(("variable", "mode"), [("HF_TOKEN", 0o600), ("NCCL_DEBUG", 0o644)])
def test_only_a_config_with_secrets_is_private(variable, mode, tmp_path):
    loaded = load_config(write_config(tmp_path, launch={"environment": {variable: "abc"}}))
    before = os.umask(0o022)
    try:
        write_resolved(loaded, adopt_directory(loaded))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run" / "config.yaml").stat().st_mode) == mode


def test_fresh_moves_a_run_aside_and_keeps_its_logs(config):
    folder, loaded = config.parent / "run", load_config(config, ["run.seed=7"])
    (folder / "checkpoints" / "4").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "mine.txt").write_text("not a run's")
    held = listing(folder)
    with pytest.raises(ValueError, match=r"run\.seed: 0 there, 7 here"):
        adopt_directory(loaded)
    adopt_directory(loaded, fresh=True)
    assert listing(folder) == held
    lines = write_resolved(loaded, folder, MADE_OF, fresh=True)
    aside = config.parent / "run.old-1"
    assert lines == [f"Moved the run in {folder} to {aside}: checkpoints, metrics.jsonl, provenance.json, config.yaml."]
    assert listing(aside) == {name: held[name] for name in ("config.yaml", "metrics.jsonl", "provenance.json")}
    assert (aside / "checkpoints" / "4").is_dir()
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "logs", "mine.txt", "provenance.json"]
    assert write_resolved(loaded, folder, fresh=True)[0].startswith(f"Moved the run in {folder} to {folder}.old-2: ")


def test_fresh_moves_the_config_last(config, monkeypatch):
    """A kill on the way leaves config.yaml in the directory, so that what is still there is known as a run."""
    folder, moved, rename = config.parent / "run", [], Path.rename

    def record(self, target):
        moved.append(self.name)
        return rename(self, target)

    (folder / "checkpoints" / "4").mkdir(parents=True)
    (folder / "report.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", record)
        write_resolved(load_config(config), folder, fresh=True)
    assert moved[-1] == "config.yaml"
    assert {*moved[:-1]} == {"checkpoints", "metrics.jsonl", "provenance.json", "report.json"}


def test_a_move_that_cannot_be_is_told_first(config):
    """On a file system of its own the folder's contents cannot be renamed to beside it; here its name is too long."""
    folder = config.parent / ("r" * 250)
    (config.parent / "run").rename(folder)
    with unchanged(folder), pytest.raises(ValueError, match=r"cannot be created: File name too long"):
        adopt_directory(load_config(config, [f"run.dir={folder}"]), fresh=True)


@pytest.mark.parametrize("fails", ["metrics.jsonl", "config.yaml"])
def test_a_failed_move_names_the_piece_and_leaves_no_empty_folder(fails, config, monkeypatch):
    folder, rename = config.parent / "run", Path.rename

    def refuse(self, target):
        if self.name == fails:
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    aside = config.parent / "run.old-1"
    with pytest.raises(UserError) as info:
        write_resolved(load_config(config), folder, fresh=True)
    assert str(info.value).startswith(f"{folder / fails} cannot be moved to {aside}: Permission denied. Move it")
    assert aside.exists() == (fails == "config.yaml")  # it holds metrics.jsonl


def test_other_data_does_not_go_on(config):
    loaded, folder = load_config(config), config.parent / "run"
    write_resolved(loaded, folder, MADE_OF)
    adopt_directory(loaded, MADE_OF)
    now = MADE_OF._replace(fingerprint="def", description="text: 4 files")
    with unchanged(folder), pytest.raises(ValueError) as info:
        adopt_directory(loaded, now)
    told = str(info.value)
    assert told.startswith(f"{folder} holds a run on other data: the contents, names or number of its examples")
    assert "  then: text: 3 files (fingerprint abc)\n  now:  text: 4 files (fingerprint def)\n" in told
    assert told.endswith("choose another run.dir, or start anew with --fresh, which moves this run aside.")
    adopt_directory(loaded, now, fresh=True)
    adopt_directory(loaded, MADE_OF._replace(fingerprint=""))  # unknown: a warning elsewhere
    (folder / "provenance.json").unlink()  # as a run of an earlier version left it
    adopt_directory(loaded, now)


@pytest.mark.parametrize("content", [b"{", b'{"model": 3}'])
def test_a_damaged_provenance_is_told(content, config):
    loaded, folder = load_config(config), config.parent / "run"
    (folder / "provenance.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"provenance\.json is corrupt: .*or remove it"):
        adopt_directory(loaded, MADE_OF)


def test_reads_written_provenance(config):
    found = MADE_OF._replace(code={"mine": ("/somewhere/mine.py", "4567")})
    write_resolved(load_config(config), config.parent / "run", found)
    assert read_provenance(config.parent / "run") == found
