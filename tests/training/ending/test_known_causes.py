"""Real failures of files, memory and imports: what is said of each, and the exit code."""

import errno
import os
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.training.checkpointing.checkpoints import SaveFailed
from spmdkit.training.ending.exits import FAILED, TRY_AGAIN, USER_MISTAKE, report_error
from spmdkit.training.ending.known_causes import known_cause


def caught(function) -> BaseException:
    with pytest.raises(BaseException) as info:
        function()
    return info.value


def fill_the_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def under(folder: Path, *names: str) -> Path:
    """A path below a file."""
    (folder / "file").write_text("")
    return folder.joinpath("file", *names)


def work_in_a_removed_folder(folder: Path) -> None:
    """Raises as anything does that asks for the working directory."""
    before = os.getcwd()
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")
    (folder / "gone").rmdir()
    try:
        report_error(caught(Path.cwd))
    finally:
        os.chdir(before)


def test_a_working_directory_that_was_removed(tmp_path, capsys):
    work_in_a_removed_folder(tmp_path)
    assert capsys.readouterr().err == (
        "error: The working directory was removed. Change to another (cd), then try again.\n"
    )


def test_a_file_limit_without_a_path():
    cause = known_cause(OSError(errno.EFBIG, os.strerror(errno.EFBIG)))
    assert cause == (USER_MISTAKE, "File too large. The file would be larger than allowed (ulimit -f).")


FAILURES = {
    "no such file": (lambda folder: (folder / "none").read_text(), USER_MISTAKE, "none: No such file or directory"),
    "a folder for a file": (lambda folder: folder.read_text(), USER_MISTAKE, "Is a directory. A folder stands where"),
    "a file for a folder": (lambda folder: under(folder, "x").read_text(), USER_MISTAKE, "Not a directory. A file"),
    "a name too long": (lambda folder: (folder / ("n" * 300)).touch(), USER_MISTAKE, "File name too long. Choose"),
    "a full disk": (lambda folder: fill_the_disk(), TRY_AGAIN, "No space left on device. Make room there"),
    "Python's memory": (lambda folder: bytearray(1 << 60), TRY_AGAIN, "There is not enough memory: MemoryError. Lower"),
    "NumPy's memory": (lambda folder: np.empty(1 << 60, np.uint8), TRY_AGAIN, "Unable to allocate 1.00 EiB"),
    "XLA's memory": (lambda folder: jnp.zeros(1 << 55).block_until_ready(), TRY_AGAIN, "train.global_batch"),
    "a missing module": (
        lambda folder: __import__("no_such_package"), USER_MISTAKE, "There is no module no_such_package, which "
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_known_failures(name, tmp_path, capsys):
    fail, code, says = FAILURES[name]
    assert report_error(caught(lambda: fail(tmp_path))) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert says in said
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.EDQUOT, errno.ESTALE, errno.EMFILE])
def test_what_the_machine_is_at_fault_for_may_be_tried_again(number):
    cause = known_cause(OSError(number, os.strerror(number), "/runs/a"))
    assert cause is not None
    assert cause.exit_code == TRY_AGAIN
    assert cause.message.startswith(f"/runs/a: {os.strerror(number)}. ")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOTEMPTY, errno.ELOOP])
def test_what_the_path_is_at_fault_for_may_not(number):
    cause = known_cause(PermissionError(number, os.strerror(number), "/runs/a"))
    assert cause is not None
    assert cause.exit_code == USER_MISTAKE


@pytest.mark.parametrize(
    "ours",
    [
        lambda: os.write(987, b""),  # EBADF: a descriptor of ours
        lambda: __import__("spmdkit.nothing"),
        lambda: (_ for _ in ()).throw(OSError("without a number")),
        lambda: (_ for _ in ()).throw(RuntimeError("RESOURCE_EXHAUSTED, says nobody but this test")),
    ],
)
def test_other_errors_are_ours(ours, capsys):
    assert report_error(caught(ours)) == FAILED
    assert "Traceback" in capsys.readouterr().err


def test_a_module_that_a_users_file_imports(tmp_path, monkeypatch, capsys):
    (tmp_path / "users_own.py").write_text("import math\nimport not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert report_error(caught(lambda: __import__("users_own"))) == USER_MISTAKE
    said = capsys.readouterr().err
    assert f"There is no module not_installed, which {tmp_path / 'users_own.py'} line 2 imports" in said
    assert f"Install it for {sys.executable}" in said


def test_nothing_that_is_quoted_reaches_the_terminal_raw(capsys):
    report_error(FileNotFoundError(errno.ENOENT, "No such file", "\x1b[31mred\x9b\u202e\udcff"))
    assert "error: \\x1b[31mred\\x9b\\u202e\\udcff: No such file" in capsys.readouterr().err


def lost(text: str) -> Exception:
    return type("JaxRuntimeError", (RuntimeError,), {})(text)


def test_the_loss_of_another_process_is_no_error_of_ours(capsys):
    gloo = lost("INTERNAL: Gloo all-reduce failed: Connection closed by peer")
    assert report_error(gloo) == TRY_AGAIN
    assert "This process has lost another one of its run: JaxRuntimeError: INTERNAL: Gloo" in capsys.readouterr().err
    save = SaveFailed("could not be written. Make room")
    save.__cause__ = gloo
    assert report_error(save) == TRY_AGAIN
    printed = capsys.readouterr().err
    assert "lost another one" in printed
    assert "Make room" not in printed
    assert report_error(lost("INTERNAL: something else")) == FAILED
