"""Every invalid input is reported in one message with exit code 2; nothing is started, changed or left behind."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from spmdkit.launch.cli import main
from support.invalid_inputs import STRATEGIES, TABLE, Invalid
from support.processes import processes_of
from support.runs import command, environment, losses, write_config

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
JOBS = ("SPMDKIT_", "KERAS_DISTRIBUTION_", "JAX_COORDINATOR", "JAX_NUM_PROC", "JAX_PROCESS_ID", "SLURM_", "OMPI_")
OPTIONS = {"eval": {"every": 0, "batches": 1}, "checkpoint": {"every": 4, "keep": 3}}


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """The directory of a run with checkpoints of steps 4 and 8 of 12."""
    config = write_config(tmp_path_factory.mktemp("half"), **OPTIONS)
    assert main(["train", str(config), "train.steps=8"]) == 0
    (config.parent / "run" / "report.html").unlink()
    return config.parent / "run"


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Returns the mode, time and content of every file, directory, link and pipe."""
    found = {}
    for path in directory.rglob("*"):
        if "__pycache__" in path.parts:
            continue
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        changed = status.st_mtime_ns if path.is_file() else 0
        found[str(path.relative_to(directory))] = (status.st_mode, changed, content)
    return found


def write_files(row: Invalid, folder: Path) -> Path:
    """Writes the config and the other files of a row; returns the path of the config."""
    config = write_config(folder, **(OPTIONS if row.damage or row.words[0] == "launch" else {}))
    if row.config is not None:
        config.write_bytes(row.config if isinstance(row.config, bytes) else row.config.encode())
    for name, content in row.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return config


def run(words: tuple[str, ...], config: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    with contextlib.chdir(config.parent):
        try:
            code = main([word.replace("CONFIG", str(config)) for word in words])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    return code, *capsys.readouterr()


@pytest.mark.slow_cases(*(name for name, row in TABLE.items() if row.damage))
@pytest.mark.parametrize("name", TABLE)
def test_reports_invalid_input(name, request, tmp_path, capsys, monkeypatch):
    row = TABLE[name]
    half = request.getfixturevalue("half") if row.damage else None
    for variable in [each for each in os.environ if each.startswith(JOBS)]:
        monkeypatch.delenv(variable)
    for variable, value in row.variables.items():
        monkeypatch.setenv(variable, value)
    config = write_files(row, tmp_path)
    if row.damage and half:
        shutil.copytree(half, tmp_path / "run")
        row.damage(tmp_path / "run")
    before = snapshot(tmp_path)
    code, printed, message = run(row.words, config, capsys)
    assert code == 2, message
    assert message.count("error: ") == 1, message
    assert "Traceback" not in message
    assert [part for part in row.messages if part not in message] == [], message
    assert not CONTROLS.search(message + printed)
    assert len(message) < 4000
    assert snapshot(tmp_path) == before
    assert processes_of(config.parent) == []


@pytest.mark.slow
def test_reports_invalid_configs_before_opening_devices(tmp_path):
    code = """if True:
        import json, sys
        from spmdkit.launch.cli import main
        from spmdkit.mesh.compat import backend_started
        for arguments in json.loads(sys.argv[1]):
            assert main(arguments) == 2, arguments
            assert not backend_started(), arguments
    """
    write_config(tmp_path)
    cases = [["train", str(tmp_path / "tiny.yaml"), *row.words[2:]] for row in STRATEGIES.values()]
    words = [sys.executable, "-c", code, json.dumps(cases)]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "run").exists()


# In processes of their own: streams, the locale, memory

SCHEDULE = ["schedule", "zbv", "--stages", "2", "--microbatches", "4"]


def run_shell(line: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a line of bash in which "$@" is spmdkit with the arguments."""
    words = ["bash", "-c", f"set -o pipefail; {line}", "bash", *command(*arguments)]
    return subprocess.run(words, env=environment(**variables), capture_output=True, timeout=240)


@pytest.mark.long_cases("4")
@pytest.mark.parametrize("gigabytes", [1.5, pytest.param(4, marks=pytest.mark.slow)])
def test_reports_low_memory(gigabytes, tmp_path):
    """Of too little, one message and 75, where native threads would abort the process; of enough, a run."""
    ended = run_shell(f'ulimit -v {int(gigabytes * 2**20)}; "$@"', "train", str(write_config(tmp_path)))
    said = ended.stderr.decode()
    assert ended.returncode == (75 if gigabytes < 2 else 0), ended.stderr
    assert ("There is not enough memory: a process may use" in said) == (gigabytes < 2)
    assert "Traceback" not in said
    assert (tmp_path / "run").exists() == (gigabytes >= 2)


# Unusual contents of a directory that do not prevent a resume


def junk(run: Path) -> None:
    for name in ("notes.txt", "12", "0x10", "-4", "999.orbax-checkpoint-tmp-1"):
        (run / "checkpoints" / name).write_text("mine")
    (run / "checkpoints" / "16").symlink_to("nothing")
    (run / "checkpoints" / "backup").mkdir()
    (run / "thesis.tex").write_text("mine")


ODD = {
    "foreign files among the checkpoints": junk,
    "a corrupt owner.json": lambda run: (run / "owner.json").write_bytes(b"\xff\x00"),
    "a corrupt goodput.jsonl": lambda run: (run / "goodput.jsonl").write_bytes(b"\xff\x00\n" * 99),
    "no metrics": lambda run: (run / "metrics.jsonl").unlink(),
    "a config.yaml with keys of a later version": lambda run: (
        (run / "config.yaml").open("a").write("later: {key: 1}\n")
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ODD)
def test_run_resumes(name, half, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("spmdkit.runtime.ownership.STALE_SECONDS", 1.0)
    config = write_config(tmp_path, **OPTIONS)
    shutil.copytree(half, tmp_path / "run")
    ODD[name](tmp_path / "run")
    assert main(["train", str(config)]) == 0, capsys.readouterr().err
    assert "at step 8 of 12" in capsys.readouterr().out
    assert list(losses(tmp_path / "run"))[-4:] == [9, 10, 11, 12]
    mine = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.read_bytes() == b"mine"]
    assert len(mine) == (6 if ODD[name] is junk else 0)


# Another user


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["checkpoints", "checkpoints/8", "config.yaml", "metrics.jsonl", ""])
def test_reports_missing_permissions(hidden, half, tmp_path):
    """As a user without rights to it, who owns the rest."""
    config = write_config(tmp_path, **OPTIONS)
    shutil.copytree(half, tmp_path / "run")
    subprocess.run(["chown", "-R", "65534:65534", str(tmp_path)], check=True)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_mode & 0o005 != 0o005 and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    subprocess.run(["chown", "0:0", str(tmp_path / "run" / hidden)], check=True)
    (tmp_path / "run" / hidden).chmod(0o700 if (tmp_path / "run" / hidden).is_dir() else 0o600)
    before = snapshot(tmp_path)
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
    assert snapshot(tmp_path) == before
