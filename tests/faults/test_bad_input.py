"""Every input of the table is one message that names the key or file, with exit code 2, and leaves nothing behind."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input import TABLE, Bad
from runs import command, environment, write_config
from spmdkit.launch.cli import main

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "__pycache__")


def given(bad: Bad, folder: Path) -> list[str]:
    """Writes the files of a case; returns its arguments."""
    path = write_config(folder)
    if bad.config is not None:
        path.write_bytes(bad.config if isinstance(bad.config, bytes) else bad.config.encode())
    for name, content in bad.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    return ["train", str(path) if bad.name is None else bad.name, *bad.overrides]


def test_the_table_is_long_enough():
    assert len(TABLE) >= 60


@pytest.mark.parametrize("name", TABLE)
def test_one_message_and_nothing_left(name, tmp_path, monkeypatch, capsys):
    bad = TABLE[name]
    arguments = given(bad, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = everything_in(tmp_path)
    code = main(arguments)
    printed, said = capsys.readouterr()
    assert code == bad.code, said
    assert said.startswith("error: ")
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    assert [part for part in bad.says if part not in said] == [], said
    assert not CONTROLS.search(said + printed)
    assert len(said) < 2500
    assert everything_in(tmp_path) == before


def test_a_long_value_is_cut_in_the_message(tmp_path, capsys):
    overrides = ["data.source=text", f"data.files=[{'x' * 5000}]"]
    assert main(["train", str(write_config(tmp_path)), *overrides]) == 2
    said = capsys.readouterr().err
    assert "xxx ... xxx" in said
    assert "matches no file" in said
    assert len(said) < 2000


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (b"\xef\xbb\xbftrain: {steps: 7}\n", 7),
        (b"train:\r\n  steps: 7\r\n", 7),
        (b"train: {steps: 7}", 7),
        (b"# nothing\n", 100),
        ("# für Zoë\ntrain: {steps: 7}\n".encode(), 7),
    ],
    ids=["a byte order mark", "lines of Windows", "no last newline", "a comment", "other scripts"],
)
def test_what_is_odd_but_right(text, steps, tmp_path):
    from spmdkit.configs import load_config

    (tmp_path / "a.yaml").write_bytes(text)
    assert load_config(tmp_path / "a.yaml").train.steps == steps


# In processes of their own: streams, the locale, memory

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SCHEDULE = ["schedule", "zbv", "--stages", "2", "--microbatches", "4"]


def run_shell(line: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a line of bash in which "$@" is spmdkit with the arguments."""
    words = ["bash", "-c", f"set -o pipefail; {line}", "bash", *command(*arguments)]
    return subprocess.run(words, env=environment(**variables), capture_output=True, timeout=240)


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ('"$@" | head -1', 0, ""),
        pytest.param('"$@" >&-', 0, "", marks=pytest.mark.slow),
        pytest.param('"$@" >&- 2>&-', 0, "", marks=pytest.mark.slow),
        ('"$@" > /dev/full', 75, "the standard output: No space left on device"),
        pytest.param('"$@" > /dev/null 2> /dev/full', 0, "", marks=pytest.mark.slow),
    ],
)
def test_a_closed_or_full_output(line, code, says):
    ended = run_shell(line, *SCHEDULE)
    said = ended.stderr.decode()
    assert ended.returncode == code, said
    assert says in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert bool(said) == bool(says)


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(C_LOCALE, marks=pytest.mark.slow),
        {**C_LOCALE, "PYTHONIOENCODING": "latin1"},
        pytest.param({"PYTHONIOENCODING": "ascii"}, marks=pytest.mark.slow),
    ],
    ids=["C", "C with Latin-1", "ASCII"],
)
def test_a_path_in_utf_8_under_another_locale(variables, tmp_path):
    """The file is found and its text is read; what the terminal cannot show is written as an escape."""
    folder = tmp_path / "für Zoë ☃"
    folder.mkdir()
    (folder / "mine.csv").write_text("F0,F1,B0,W0,B1,W1\n", encoding="utf-8")
    picture = folder / "☃.svg"
    ended = run_shell('"$@"', "schedule", str(folder / "mine.csv"), "--svg", str(picture), **variables)
    assert ended.returncode == 0, ended.stderr.decode()
    assert picture.is_file()
    assert b"\\u2603.svg" in ended.stdout or "☃.svg".encode() in ended.stdout
    ended = run_shell('"$@"', "explain", str(folder), **variables)
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"error: 1 problem in ")
    assert b"this is a folder" in ended.stderr
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize("gigabytes", [1.5, pytest.param(4, marks=pytest.mark.slow)])
def test_little_memory(gigabytes, tmp_path):
    """Of too little, one message and 75, where native threads would abort the process; of enough, a run."""
    ended = run_shell(f'ulimit -v {int(gigabytes * 2**20)}; "$@"', "train", str(write_config(tmp_path)))
    said = ended.stderr.decode()
    assert ended.returncode == (75 if gigabytes < 2 else 0), ended.stderr
    assert ("There is not enough memory: a process may use" in said) == (gigabytes < 2)
    assert "Traceback" not in said
    assert (tmp_path / "run").exists() == (gigabytes >= 2)


def test_a_config_that_cannot_be_read(capsys):
    """A regular file whose first byte nobody may read, root included."""
    assert main(["train", "/proc/self/mem"]) == 2
    assert "the file cannot be read: Input/output error" in capsys.readouterr().err
