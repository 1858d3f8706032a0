"""Whether a folder can hold a run is known before anything is computed, and looking leaves no trace."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from spmdkit.configs import load_config
from spmdkit.mesh.errors import UserError
from spmdkit.runtime import machine_check as memory
from spmdkit.runtime.build_run import build
from spmdkit.runtime.finish import measured_memory
from spmdkit.runtime.machine_check import DirectoryUnavailable, check_directory, check_memory
from spmdkit.runtime.run_directory import is_run, make_directory
from support.runs import unchanged, write_config


def test_a_folder_of_a_run(tmp_path):
    for name in ("checkpoints", "logs"):
        (tmp_path / name).mkdir()
    for name in ("config.yaml", "metrics.jsonl", "report.html"):
        (tmp_path / name).write_text("{}")
    with unchanged(tmp_path):
        check_directory(tmp_path)


@pytest.mark.parametrize("made", [check_directory, make_directory])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n" * 300, "cannot be created: File name too long. Set run.dir to another directory."),
        ("file", "cannot be created: {here}/file is a file. Set run.dir to another directory, or"),
        ("file/below/it", "cannot be created: {here}/file is a file."),
        ("loop", "cannot be created: "),
        ("nothing", "cannot be created: "),
        ("nothing/below/it", "cannot be created: "),
    ],
)
def test_a_folder_that_cannot_be_made(name, message, made, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nothing").symlink_to(tmp_path / "is" / "not")
    with unchanged(tmp_path), pytest.raises(ValueError) as info:
        made(tmp_path / name)
    assert f"The directory {tmp_path / name} of run.dir {message.format(here=tmp_path)}" in str(info.value)


def test_every_piece_of_the_wrong_kind_is_named(tmp_path):
    (tmp_path / "config.yaml").mkdir()
    (tmp_path / "logs").write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "none")
    os.mkfifo(tmp_path / "report.json")
    (tmp_path / "goodput.jsonl").symlink_to("/dev/null")
    with pytest.raises(ValueError) as info:
        check_directory(tmp_path)
    assert set(str(info.value).splitlines()) == {
        f"{tmp_path / name} is a {found}; a run keeps a {kind} of that name. Move it, or set run.dir to another "
        "directory."
        for name, found, kind in [
            ("config.yaml", "directory", "file"),
            ("logs", "file", "directory"),
            ("metrics.jsonl", "broken symbolic link", "file"),
            ("report.json", "device or pipe", "file"),
            ("goodput.jsonl", "device or pipe", "file"),
        ]
    }


@pytest.mark.parametrize(
    ("number", "error", "exit_code"),
    [
        (errno.ENOSPC, DirectoryUnavailable, 75),
        (errno.EROFS, DirectoryUnavailable, 75),
        (errno.EIO, DirectoryUnavailable, 75),
        (errno.EDQUOT, DirectoryUnavailable, 75),
        (errno.EACCES, ValueError, 2),
    ],
)
def test_whose_fault_it_is(number, error, exit_code, tmp_path, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error, match=os.strerror(number)) as info:
        check_directory(tmp_path / "run")
    assert info.value.exit_code == exit_code
    assert list(tmp_path.iterdir()) == []


MOUNTED = """
import sys
from pathlib import Path
from spmdkit.runtime.machine_check import check_directory
try:
    check_directory(Path(sys.argv[1]))
except Exception as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="unshare is Linux's")
@pytest.mark.parametrize(
    ("options", "place", "reason"),
    [
        ("ro", "disk", "Read-only file system"),
        ("size=16k", "disk", "No space left on device"),
        ("ro", "disk/run/checkpoints", "Read-only file system"),
    ],
)
def test_a_real_file_system_that_takes_nothing(options, place, reason, tmp_path):
    (tmp_path / place).mkdir(parents=True)
    mounted = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o {options} none {tmp_path / place} && exec "$@"', "sh"]
    if subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("`unshare -rm` may not mount here: run this as root, or allow user namespaces")
    command = [*mounted, sys.executable, "-c", MOUNTED, str(tmp_path / "disk" / "run")]
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
    with pytest.raises(UserError, match=r"of run\.dir has a name that is not valid UTF-8, so no checkpoint"):
        check_directory(Path("run").absolute())


WIDE = ["model.widths=[16000000, 1000000]"]  # 1.6e13 parameters, and adamw's two averages of each


def built(folder, *overrides: str):
    return build(load_config(write_config(folder), overrides))


def test_a_state_beyond_the_machine(tmp_path):
    with pytest.raises(UserError) as info:
        check_memory(built(tmp_path, *WIDE))
    said = str(info.value)
    assert "The state of this run does not fit: parameters and optimizer take 43.7 TiB on each device, 8 x 43" in said
    assert "and this machine has " in said
    assert "strategy.fsdp" in said


def test_a_limit_on_the_process(tmp_path, monkeypatch):
    """8 devices hold 2,410 parameters and two averages, over `fsdp: 4`: 60 KiB are enough, 20 are not."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (20 * 1024, 20 * 1024))
    with pytest.raises(UserError, match=r"ulimit -v allows 20 KiB"):
        check_memory(built(tmp_path))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (80 * 1024, 80 * 1024))
    check_memory(built(tmp_path))


@pytest.mark.parametrize(("limit", "fits"), [(1 << 10, False), (1 << 20, True), (None, True)])
def test_each_device_of_its_own_memory(limit, fits, tmp_path, monkeypatch):
    run = built(tmp_path)
    stats = limit and {"bytes_limit": limit}
    accelerator = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [accelerator] * 8)
    if fits:
        check_memory(run)
    else:
        with pytest.raises(UserError, match=r"and a device has 1 KiB"):
            check_memory(run)


def test_the_most_that_was_in_use_is_that_of_the_system():
    """On processors it is the resident memory of this process, which holds all its devices."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    most = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    assert measured_memory() == {"the process, with 8 devices": pytest.approx(most, rel=0.05)}


@pytest.mark.parametrize("name", ["goodput.jsonl", "metrics.jsonl", "config.yaml", "owner.json.lock", "samples.jsonl"])
def test_a_link_in_place_of_a_file_of_the_run_is_refused(name, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(mine)
    with pytest.raises(ValueError, match=rf"{name} is a symbolic link to {mine}, a file outside of the run that it"):
        check_directory(run)
    (run / name).unlink()
    (tmp_path / "disk").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    check_directory(run)
