"""What cannot be launched is one message with exit code 2; nothing is started, lost or left behind."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bad_launch import LAUNCH, TABLE, TRAIN, Bad
from left import processes_of
from runs import command, environment, losses, write_config
from spmdkit.launch.cli import main

pytestmark = [pytest.mark.faults, pytest.mark.multiprocess]
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
OPTIONS = {"eval": {"every": 0, "batches": 1}, "checkpoint": {"every": 4, "keep": 3}}


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """The folder of a run with checkpoints of steps 4 and 8 of 12."""
    config = write_config(tmp_path_factory.mktemp("half"), **OPTIONS)
    assert main(["train", str(config), "train.steps=8"]) == 0
    (config.parent / "run" / "report.html").unlink()
    return config.parent / "run"


def everything_in(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file, folder, link and pipe, with its times and contents."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        changed = status.st_mtime_ns if path.is_file() else 0
        found[str(path.relative_to(folder))] = (status.st_mode, changed, content)
    return found


def run(bad: Bad, config: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Runs a command; in this process where it only looks, in its own where it starts or joins others."""
    words = [word.replace("CONFIG", str(config)) for word in bad.words]
    if bad.variables or (bad.damage and bad.words == LAUNCH):
        clean = {name: value for name, value in environment().items() if not name.startswith("KERAS_")}
        ended = subprocess.run(
            command(*words), env=clean | bad.variables, capture_output=True, text=True, timeout=200, cwd=config.parent
        )
        return ended.returncode, ended.stdout, ended.stderr
    capsys.readouterr()
    with contextlib.chdir(config.parent):
        try:
            code = main(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    return code, *capsys.readouterr()


def test_the_table_is_long_enough():
    assert len(TABLE) >= 40


@pytest.mark.parametrize("name", TABLE)
def test_one_message_and_nothing_lost(name, half, tmp_path, capsys, monkeypatch):
    bad = TABLE[name]
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = write_config(tmp_path, **OPTIONS)
    if bad.damage is not None:
        shutil.copytree(half, tmp_path / "run")
        bad.damage(tmp_path / "run")
    before = everything_in(tmp_path)
    code, printed, said = run(bad, config, capsys)
    assert code == bad.code, said
    assert "error: " in said
    assert "Traceback" not in said
    assert [part for part in bad.says if part not in said] == [], said
    assert not CONTROLS.search(said + printed), said
    assert len(said) < 4000, said
    assert everything_in(tmp_path) == before
    assert processes_of(config) == []


# What is odd in a folder, and no reason not to go on


def junk(run: Path) -> None:
    for name in ("notes.txt", "12", "0x10", "-4", "999.orbax-checkpoint-tmp-1"):
        (run / "checkpoints" / name).write_text("mine")
    (run / "checkpoints" / "16").symlink_to("nothing")
    (run / "checkpoints" / "backup").mkdir()
    (run / "thesis.tex").write_text("mine")


ODD = {
    "foreign files among the checkpoints": junk,
    "an empty folder of a later step": lambda run: (run / "checkpoints" / "999").mkdir(),
    "metrics cut in a line": lambda run: (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:-9]),
    "metrics that end in null bytes": lambda run: (run / "metrics.jsonl").open("ab").write(bytes(512)),
    "an owner.json of garbage": lambda run: (run / "owner.json").write_bytes(b"\xff\x00"),
    "half an owner.json": lambda run: (run / "owner.json").write_text('{"host": "a", "pl'),
    "a goodput.jsonl of garbage": lambda run: (run / "goodput.jsonl").write_bytes(b"\xff\x00\n" * 99),
    "half a goodput.jsonl": lambda run: (run / "goodput.jsonl").write_bytes((run / "goodput.jsonl").read_bytes()[:-9]),
    "a goodput.jsonl of null bytes": lambda run: (run / "goodput.jsonl").write_bytes(bytes(512)),
    "a goodput.jsonl of another program": lambda run: (run / "goodput.jsonl").write_text('[1]\n{"kind": 7}\n"a"\n3\n'),
    "a goodput.jsonl with times of words": lambda run: (
        (run / "goodput.jsonl").open("a").write('{"at": "noon", "kind": "step", "step": "x", "seconds": null}\n')
    ),
    "no goodput.jsonl": lambda run: (run / "goodput.jsonl").unlink(),
    "a guards.json of garbage": lambda run: (run / "guards.json").write_bytes(b"\xff\x00"),
    "an owner.json of null bytes": lambda run: (run / "owner.json").write_bytes(bytes(64)),
    "a claim on an owner that is gone": lambda run: (run / "owner.json.after-0").write_text("{"),
    "no provenance.json": lambda run: (run / "provenance.json").unlink(),
    "no metrics": lambda run: (run / "metrics.jsonl").unlink(),
    "a config.yaml with keys of a later version": lambda run: (
        (run / "config.yaml").open("a").write("later: {key: 1}\n")
    ),
    "a folder for a log": lambda run: (run / "logs" / "rank-0.log").mkdir(parents=True),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ODD)
def test_it_goes_on(name, half, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("spmdkit.launch.run.directory.ownership.STALE_SECONDS", 1.0)
    config = write_config(tmp_path, **OPTIONS)
    shutil.copytree(half, tmp_path / "run")
    ODD[name](tmp_path / "run")
    assert main(["train", str(config)]) == 0, capsys.readouterr().err
    assert "at step 8 of 12" in capsys.readouterr().out
    assert list(losses(tmp_path / "run"))[-4:] == [9, 10, 11, 12]
    mine = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.read_bytes() == b"mine"]
    assert len(mine) == (6 if ODD[name] is junk else 0)


# Where the machine does not allow it: file systems of their own, and another user


@pytest.fixture
def mounted(tmp_path):
    """Mounts file systems, as root; unmounts them."""
    assert os.geteuid() == 0, "these tests mount file systems: run them as root"
    places = []

    def mount(place: Path, *words: str) -> Path:
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", *words, str(place)], check=True)
        places.append(place)
        return place

    yield mount
    for place in reversed(places):
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("words", [TRAIN, LAUNCH])
def test_a_read_only_folder(words, mounted, half, tmp_path, capsys):
    config = write_config(tmp_path, **OPTIONS)
    shutil.copytree(half, tmp_path / "run")
    mounted(tmp_path / "run", "--bind", str(tmp_path / "run"))
    subprocess.run(["mount", "-o", "remount,ro,bind", str(tmp_path / "run")], check=True)
    before = everything_in(tmp_path)
    code, _, said = run(Bad((), words), config, capsys)
    assert code == 75, said
    assert "Read-only file system" in said
    assert "Traceback" not in said
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("words", [TRAIN, LAUNCH])
def test_a_full_disk_when_it_is_run_again(words, mounted, half, tmp_path, capsys):
    config = write_config(tmp_path, **OPTIONS)
    disk = mounted(tmp_path / "run", "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    shutil.copytree(half, disk, dirs_exist_ok=True)
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))
    before = everything_in(tmp_path)
    code, _, said = run(Bad((), words), config, capsys)
    assert code == 75, said
    assert "No space left on device" in said
    assert "Traceback" not in said
    assert everything_in(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "hidden", ["checkpoints", "checkpoints/8", "config.yaml", "metrics.jsonl", "provenance.json", ""]
)
def test_what_may_not_be_read(hidden, half, tmp_path):
    """As a user without rights to it, who owns the rest."""
    config = write_config(tmp_path, **OPTIONS)
    shutil.copytree(half, tmp_path / "run")
    subprocess.run(["chown", "-R", "65534:65534", str(tmp_path)], check=True)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_mode & 0o005 != 0o005 and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    subprocess.run(["chown", "0:0", str(tmp_path / "run" / hidden)], check=True)
    (tmp_path / "run" / hidden).chmod(0o700 if (tmp_path / "run" / hidden).is_dir() else 0o600)
    before = everything_in(tmp_path)
    ended = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command("train", config)],
        env=environment(HOME="/nonexistent", JAX_COMPILATION_CACHE_DIR="", PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    assert ended.returncode in (2, 75), ended.stderr
    assert hidden in ended.stderr
    assert "Traceback" not in ended.stderr
    assert everything_in(tmp_path) == before
