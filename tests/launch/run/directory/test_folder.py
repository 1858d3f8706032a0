"""Whether a folder can hold a run is known before anything is computed, and looking leaves no trace."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import listing
from spmdkit.launch.run.directory.folder import FolderUnavailable, check_folder, is_run, make_folder
from spmdkit.mesh.errors import UserError


def test_a_folder_that_can_be_made(tmp_path):
    check_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_run(tmp_path):
    for name in ("checkpoints", "logs"):
        (tmp_path / name).mkdir()
    for name in ("config.yaml", "metrics.jsonl", "report.html"):
        (tmp_path / name).write_text("{}")
    before = listing(tmp_path)
    check_folder(tmp_path)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("made", [check_folder, make_folder])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n" * 300, "cannot be made: File name too long. Set run.dir to another."),
        ("/".join(["d" * 200] * 22), "cannot be made: File name too long"),
        ("file", "cannot be made: {here}/file is a file. Set run.dir to another, or move it away."),
        ("file/below/it", "cannot be made: {here}/file is a file."),
        ("loop", "cannot be made: "),
        ("nothing", "cannot be made: "),
    ],
)
def test_a_folder_that_cannot_be_made(name, message, made, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nothing").symlink_to(tmp_path / "is" / "not")
    before = listing(tmp_path)
    with pytest.raises(ValueError) as info:
        made(tmp_path / name)
    assert f"The folder {tmp_path / name} of run.dir {message.format(here=tmp_path)}" in str(info.value)
    assert listing(tmp_path) == before


def test_a_path_just_too_long_for_what_a_run_writes(tmp_path):
    folder = tmp_path / "/".join(["d" * 200] * 19 + ["e" * (4000 - 19 * 201 - len(str(tmp_path)))])
    with pytest.raises(ValueError, match="File name too long"):
        check_folder(folder)


def test_a_name_that_no_path_may_have():
    with pytest.raises(ValueError, match=r"cannot be made: .*embedded null (byte|character)"):
        check_folder(Path("/tmp/a\0b"))


def test_every_piece_of_the_wrong_kind_is_named(tmp_path):
    files = ("config.yaml", "metrics.jsonl", "report.html", "provenance.json")
    for name in files:
        (tmp_path / name).mkdir()
    for name in ("checkpoints", "logs"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError) as info:
        check_folder(tmp_path)
    lines = str(info.value).splitlines()
    assert len(lines) == 6
    for name in files:
        assert (
            f"{tmp_path / name} is a folder; a run keeps a file of that name. Move it away, or set run.dir to another "
            "folder."
        ) in lines
    assert sum("is a file; a run keeps a folder of that name." in line for line in lines) == 2


def test_pieces_that_are_no_files_at_all(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    (tmp_path / "checkpoints").symlink_to(tmp_path / "gone")
    with pytest.raises(
        ValueError, match=r"checkpoints cannot be used: No such file.*\n.*metrics\.jsonl is a device or pi"
    ):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("number", "error", "exit_code"),
    [
        (errno.ENOSPC, FolderUnavailable, 75),
        (errno.EROFS, FolderUnavailable, 75),
        (errno.EDQUOT, FolderUnavailable, 75),
        (errno.EIO, FolderUnavailable, 75),
        (errno.EACCES, ValueError, 2),
        (errno.EPERM, ValueError, 2),
    ],
)
def test_whose_fault_it_is(number, error, exit_code, tmp_path, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error, match=os.strerror(number)) as info:
        check_folder(tmp_path / "run")
    assert info.value.exit_code == exit_code
    assert list(tmp_path.iterdir()) == []


MOUNTED = """
import sys
from pathlib import Path
from spmdkit.launch.run.directory.folder import check_folder
try:
    check_folder(Path(sys.argv[1]))
except Exception as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="unshare is Linux's")
@pytest.mark.parametrize(
    ("options", "reason"), [("ro", "Read-only file system"), ("size=16k", "No space left on device")]
)
def test_a_real_file_system_that_takes_nothing(options, reason, tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mounted = f'mount -t tmpfs -o {options} none {place} && exec "$@"'
    if subprocess.run(["unshare", "-rm", "sh", "-c", f"{mounted}", "sh", "true"], capture_output=True).returncode:
        pytest.skip("`unshare -rm` may not mount here: run this as root, or allow user namespaces")
    command = ["unshare", "-rm", "sh", "-c", mounted, "sh", sys.executable, "-c", MOUNTED, str(place / "run")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, reason in ended.stdout) == (75, True), ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ({}, False),
        ({"config.yaml": "run: {}"}, False),
        ({"metrics.jsonl": ""}, False),
        ({"metrics.jsonl": "{}"}, True),
        ({"checkpoints/4/state": "x"}, True),
        ({"checkpoints/4.orbax-checkpoint-tmp-1/state": "x"}, False),
        ({"checkpoints/removed-4/state": "x"}, False),
    ],
)
def test_what_makes_a_folder_a_run(pieces, expected, tmp_path):
    for name, text in pieces.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert is_run(tmp_path) == expected


def test_a_name_that_is_no_text(tmp_path, monkeypatch):
    """Also where only the working directory has it: every save would fail there, and be tried again."""
    folder = tmp_path / os.fsdecode(b"r\xffn")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"of run\.dir has a name that is no text in UTF-8, under which no checkpoint"):
        check_folder(Path("run").absolute())
