"""Errors of reading a checkpoint: damage is reported only if it is certain, in one message."""

import asyncio
import errno
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint._src import asyncio_utils
from spmdkit.checkpoints import damage
from spmdkit.checkpoints.damage import CheckpointUnavailable, DamagedCheckpoint, explain, reason
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.mesh.known_causes import TRACEBACK_VARIABLE, machine_remedy
from support.checkpoint_states import abstract, host_state, placed

FOLDER = Path("/runs/one/checkpoints/20")


@pytest.mark.parametrize("number", sorted(damage.NOT_DAMAGE))
def test_errors_of_the_machine_are_not_damage(number):
    texts = f"failed [OS error {number}: x]", f"failed [tensorstore_spec='..'] [os_error_code='{number}']"
    for error in (OSError(number, os.strerror(number)), *map(ValueError, texts)):
        meant = explain(FOLDER, error)
        if number == errno.ENOMEM and isinstance(error, OSError):
            assert meant is error or isinstance(meant, CheckpointUnavailable)
            continue
        assert isinstance(meant, CheckpointUnavailable)
        assert meant.exit_code == 75
        assert "leave it there" in str(meant)
        assert "remove" not in str(meant)


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "x"), ValueError("CRC differs")])
def test_wrong_bytes_and_missing_files_are_damage(error):
    meant = explain(FOLDER, error)
    assert isinstance(meant, DamagedCheckpoint)
    assert str(meant).startswith(f"The checkpoint {FOLDER} is damaged: {type(error).__name__}: ")
    assert meant.exit_code == 2


def test_the_cause_that_orbax_wraps_decides():
    error = RuntimeError("failed to restore")
    error.__cause__ = ValueError("CRC differs")
    assert isinstance(explain(FOLDER, error), DamagedCheckpoint)


def test_out_of_memory_is_passed_on():
    for error in (MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")):
        with pytest.raises(type(error)) as raised, damage.reading(FOLDER):
            raise error
        assert raised.value is error
        assert error.__cause__ is None


def test_a_reason_is_one_line_without_settings():
    assert reason(ValueError("a\n  b [tensorstore_spec='{\"x\": 1}']")) == "ValueError: a b"
    assert reason(ValueError("x" * 1000)).endswith(" ...")
    assert reason(ValueError(f"{'x' * 1000} [OS error 28: ...]")).startswith("No space left on device: ValueError: xx")


@pytest.mark.parametrize(
    "error",
    [
        ValueError('Error parsing object member "base": Invalid file path: "/a/../b/" [tensorstore_spec=\'{}\']'),
        OSError(errno.ELOOP, os.strerror(errno.ELOOP)),
        OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)),
        RuntimeError("unsupported version"),
        KeyError("state"),
    ],
)
def test_does_not_report_damage_if_a_checkpoint_cannot_be_opened(error):
    meant = explain(FOLDER, error)
    assert isinstance(meant, damage.CheckpointError)
    assert not isinstance(meant, DamagedCheckpoint)
    assert str(meant).startswith(f"The checkpoint {FOLDER} cannot be opened: {type(error).__name__}: ")
    assert "Nothing shows that it is damaged: keep it." in str(meant)


@pytest.mark.parametrize("how", ["truncate", "remove"])
def test_cut_files_of_large_arrays_are_damage(how, tmp_path):
    """Orbax wraps TensorStore's error of an array that is in files of its own; only the cause has its kind."""
    state = placed(host_state(0)._replace(params={"large": np.ones((64, 256), np.float32)}), 8, "fsdp", split=True)
    with Checkpoints(tmp_path / "checkpoints", keep=3, abstract_state=abstract(state)) as checkpoints:
        checkpoints.save(10, state)
        checkpoints.wait()
        files = [path for path in (tmp_path / "checkpoints" / "10").rglob("d/*") if path.stat().st_size > 8192]
        assert files
        for path in files:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) if how == "truncate" else path.unlink()
        with pytest.raises(DamagedCheckpoint, match="is damaged: "):
            checkpoints.restore(10)


# What Orbax prints

ORBAX, OURS = "/site-packages/orbax/checkpoint/save.py", "/site-packages/spmdkit/loop.py"


@pytest.fixture
def quiet(monkeypatch):
    """The function as at the first checkpoint of a process."""
    for name in ("absl", "asyncio"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    monkeypatch.setattr(asyncio_utils, "run_sync", asyncio_utils.run_sync)
    return damage.leave_errors_to_one_message.__wrapped__


def lets_through(logger: str, path: str, text: str = "", error: Exception | None = None) -> bool:
    traced = (type(error), error, error.__traceback__) if error else None
    record = logging.LogRecord(logger, logging.ERROR, path, 1, text, (), traced)
    return bool(logging.getLogger(logger).filter(record))


def test_suppresses_errors_of_orbax_only(quiet, monkeypatch):
    monkeypatch.delenv(TRACEBACK_VARIABLE, raising=False)
    quiet()
    assert [lets_through("absl", path) for path in (ORBAX, OURS)] == [False, True]
    assert [lets_through("asyncio", OURS, f"Task exception: {path}") for path in (ORBAX, OURS)] == [False, True]
    for path in (ORBAX, OURS):
        with pytest.raises(OSError) as raised:
            exec(compile("raise OSError(28, 'No space left on device')", path, "exec"))
        assert lets_through("asyncio", OURS, "Future exception was never retrieved", raised.value) == (path == OURS)


@pytest.mark.parametrize("traceback", ["0", "1"])
def test_failed_write_waits_for_the_others_of_its_thread(quiet, monkeypatch, traceback):
    monkeypatch.setenv(TRACEBACK_VARIABLE, traceback)
    written = []

    async def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    async def write():
        await asyncio.sleep(0.1)
        written.append(True)

    async def both():
        await asyncio.gather(fail(), write())

    quiet()
    with ThreadPoolExecutor(1) as thread, pytest.raises(OSError, match="No space left"):
        thread.submit(asyncio_utils.run_sync, both()).result()
    assert written == [True]


NO_MEMORY = "error: [OS error 12: Cannot allocate memory]"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (MemoryError(), "Raise the limit of memory (ulimit -v, or that of the job), or close other programs"),
        (RuntimeError("can't start new thread"), "Raise the limit of memory"),
        (ValueError(NO_MEMORY), "Raise the limit of memory"),
        (ValueError("RESOURCE_EXHAUSTED: x"), "Raise the limit of memory"),
        (RuntimeError("std::bad_alloc"), "Raise the limit of memory"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Raise the limit of open files (ulimit -n)"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "Free space or repair the file system"),
    ],
)
def test_remedy_depends_on_what_the_machine_lacks(error, remedy):
    assert machine_remedy(error).startswith(remedy)
    wrapped = KeyError("of a library")
    wrapped.__cause__ = error
    assert ("memory" not in remedy) or machine_remedy(wrapped).startswith(remedy)


def test_a_restore_without_memory_names_the_limit():
    meant = explain(FOLDER, ValueError(NO_MEMORY))
    assert isinstance(meant, CheckpointUnavailable)
    assert "leave it there, raise the limit of memory (ulimit -v" in str(meant)
