"""Real failures of files, memory and imports: the message and the exit code."""

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.checkpoints.manager import SaveFailed
from spmdkit.mesh.devices import simulate
from spmdkit.mesh.exit_codes import FAILED, INVALID_INPUT, TRY_AGAIN
from spmdkit.mesh.known_causes import (
    MARK,
    RELAYED,
    known_cause,
    ranks_without_heartbeat,
    report_error,
    reports_lost_peer,
)


def caught(function) -> BaseException:
    with pytest.raises(BaseException) as info:
        function()
    return info.value


def fill_the_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def test_reports_a_removed_working_directory(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    report_error(caught(Path.cwd))
    assert capsys.readouterr().err == (
        "error: The working directory was removed. Change to another (cd), then try again.\n"
    )
    error = caught(Path.cwd)
    with monkeypatch.context() as changed:  # some file systems keep the number of links
        changed.setattr(os, "stat", lambda path: SimpleNamespace(st_nlink=2))
        assert known_cause(error) is not None


FAILURES = {
    "no such file": (lambda folder: (folder / "none").read_text(), INVALID_INPUT, "none: No such file or directory"),
    "a folder for a file": (lambda folder: folder.read_text(), INVALID_INPUT, "Is a directory. Correct the path"),
    "a name too long": (lambda folder: (folder / ("n" * 300)).touch(), INVALID_INPUT, "File name too long. Correct"),
    "a full disk": (lambda folder: fill_the_disk(), TRY_AGAIN, "No space left on device. Correct this on the machine"),
    "Python's memory": (lambda folder: bytearray(1 << 60), TRY_AGAIN, "There is not enough memory: MemoryError. Lower"),
    "NumPy's memory": (lambda folder: np.empty(1 << 60, np.uint8), TRY_AGAIN, "Unable to allocate 1.00 EiB"),
    "XLA's memory": (lambda folder: jnp.zeros(1 << 55).block_until_ready(), TRY_AGAIN, "train.global_batch"),
}


@pytest.mark.parametrize("kind", [ImportError, OSError, RuntimeError])
def test_memory_may_run_out_while_a_library_is_loaded(kind):
    code, cause = known_cause(kind("libx.so: failed to map segment from shared object"))
    assert (code, cause.partition(":")[0]) == (TRY_AGAIN, "There is not enough memory")


@pytest.mark.parametrize("name", FAILURES)
def test_explains_known_failures(name, tmp_path, capsys):
    fail, code, says = FAILURES[name]
    assert report_error(caught(lambda: fail(tmp_path))) == code
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert says in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *[(getattr(errno, name), TRY_AGAIN) for name in ("EROFS", "EIO", "EDQUOT", "EMFILE", "ENOTCONN", "EBUSY")],
        *[(getattr(errno, name), INVALID_INPUT) for name in ("EACCES", "ELOOP", "EFBIG")],
    ],
)
def test_errors_of_the_machine_can_be_tried_again_and_those_of_a_path_cannot(number, code):
    path = [] if number == errno.EFBIG else ["/a"]
    found, message = known_cause(OSError(number, os.strerror(number), *path))
    assert (found, message.partition(". ")[0]) == (code, ": ".join([*path, os.strerror(number)]))


@pytest.mark.parametrize(
    "ours",
    [
        lambda: os.write(987, b""),  # EBADF: a descriptor of spmdkit
        lambda: __import__("spmdkit.nothing"),
        lambda: (_ for _ in ()).throw(OSError("without a number")),
        lambda: (_ for _ in ()).throw(OSError(errno.EINVAL, "Invalid argument", "/a")),
        lambda: (_ for _ in ()).throw(OSError(errno.ENOENT, "No such file or directory")),  # the working one exists
        lambda: (_ for _ in ()).throw(RuntimeError("RESOURCE_EXHAUSTED, but not from XLA")),
        lambda: (_ for _ in ()).throw(RuntimeError("out of memory budget")),
        lambda: int("x"),
    ],
)
def test_prints_unexpected_errors_with_a_traceback(ours, capsys):
    assert report_error(caught(ours)) == FAILED
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert "Please report it" in printed


def test_reports_a_missing_import_of_a_users_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "users_own.py").write_text("import math\nimport not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert report_error(caught(lambda: __import__("users_own"))) == INVALID_INPUT
    printed = capsys.readouterr().err
    assert f"Missing module not_installed, which {tmp_path / 'users_own.py'} line 2 imports" in printed
    assert f"Install it for {sys.executable}" in printed


def test_escapes_control_characters(capsys):
    report_error(FileNotFoundError(errno.ENOENT, "No such file", "\x1b[31mred\x9b\u202e\udcff"))
    assert "error: \\x1b[31mred\\x9b\\u202e\\udcff: No such file" in capsys.readouterr().err


def lost(text: str) -> Exception:
    return jax.errors.JaxRuntimeError(text)


def test_explains_the_loss_of_another_process(capsys):
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


def test_prints_a_user_error_as_one_message(capsys, monkeypatch):
    mistake = caught(lambda: simulate(0))
    assert report_error(mistake) == INVALID_INPUT
    assert capsys.readouterr().err == "error: simulate(0): the number of simulated devices must be at least 1.\n"
    monkeypatch.setenv("SPMDKIT_TRACEBACK", "1")
    assert report_error(mistake) == INVALID_INPUT
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_marks_lines_for_a_launcher(capsys, monkeypatch):
    for name, value in RELAYED.items():
        monkeypatch.setenv(name, value)
    assert report_error(caught(lambda: int("x"))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(MARK) for line in lines)
    assert lines[0] == f"{MARK}Traceback (most recent call last):"
    assert "Please report it" in lines[-1]


def test_uses_the_exit_code_of_an_error(capsys):
    class Late(RuntimeError):
        exit_code = 3

    assert report_error(Late("loss is nan")) == 3
    assert capsys.readouterr().err == "error: loss is nan\n"
    assert report_error(KeyboardInterrupt()) == TRY_AGAIN
    assert "interrupted" in capsys.readouterr().err
    assert [report_error(SystemExit(given)) for given in (0, None, 7, "bad")] == [0, 0, 7, 1]


GLOO = "INTERNAL: Gloo all-reduce failed: [external/gloo/transport/tcp/pair.cc:544] Connection closed by peer"
UNHEALTHY = "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n/job:jax_worker/task:1"


@pytest.mark.parametrize(
    "text",
    [
        GLOO,
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail] "
        "op.preamble.length <= op.nbytes. 8 vs 4. Received data size doesn't match expected size.",
        "Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cpu:gloo/0,1/0",
        "Terminating process because the JAX distributed service detected fatal errors.",
        "INTERNAL: Failed to send RPC to coordination service.",
        "DEADLINE_EXCEEDED: Barrier timed out. Id: x",
        "NCCL operation failed: ncclRemoteError",
        UNHEALTHY,
    ],
)
def test_recognizes_a_lost_peer(text):
    assert reports_lost_peer(text)


def test_other_messages_are_not_a_lost_peer():
    assert not any(map(reports_lost_peer, ("RuntimeError: boom", "No space left on device", "the loss is nan", "")))


def test_ranks_without_heartbeat():
    two = "The following tasks are unhealthy (stopped sending heartbeats):\n1\n12\nThe tasks"
    assert [ranks_without_heartbeat(text) for text in (UNHEALTHY, two, GLOO)] == [[1], [1, 12], []]
