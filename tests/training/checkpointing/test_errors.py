"""What an error that comes while a checkpoint is read means; damage is said only where it is certain."""

import errno
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_states import abstract, host_state, placed, unfinished_reads
from spmdkit.training.checkpointing.checkpoints import Checkpoints
from spmdkit.training.checkpointing.errors import (
    NOT_DAMAGE,
    CheckpointError,
    CheckpointUnavailable,
    DamagedCheckpoint,
    differences,
    mismatch,
    other_bits,
    reason,
    unreadable,
)

FOLDER = Path("/runs/one/checkpoints/20")


@pytest.mark.parametrize("number", sorted(NOT_DAMAGE))
def test_the_machine_is_not_the_files(number):
    texts = f"failed [OS error {number}: x]", f"failed [tensorstore_spec='..'] [os_error_code='{number}']"
    for error in (OSError(number, os.strerror(number)), *map(ValueError, texts)):
        meant = unreadable(FOLDER, error)
        if number == errno.ENOMEM and isinstance(error, OSError):
            assert meant is error or isinstance(meant, CheckpointUnavailable)
            continue
        assert isinstance(meant, CheckpointUnavailable)
        assert meant.exit_code == 75
        assert "leave it there" in str(meant)
        assert "remove" not in str(meant)


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "x"), ValueError("CRC differs"), KeyError("state")])
def test_the_rest_is_damage(error):
    meant = unreadable(FOLDER, error)
    assert isinstance(meant, DamagedCheckpoint)
    assert str(meant).startswith(f"The checkpoint {FOLDER} is damaged: {type(error).__name__}: ")
    assert meant.exit_code == 2


def test_no_memory_is_for_others_to_explain():
    for error in (MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")):
        assert unreadable(FOLDER, error) is error


def test_what_is_known_already_stays():
    error = DamagedCheckpoint("known")
    assert unreadable(FOLDER, error) is error


def test_a_reason_is_one_line_without_settings():
    assert reason(ValueError("a\n  b [tensorstore_spec='{\"x\": 1}']")) == "ValueError: a b"
    assert reason(ValueError("x" * 1000)).endswith(" ...")
    assert reason(ValueError(f"{'x' * 1000} [OS error 28: ...]")).startswith("No space left on device: ValueError: xx")


def test_differences_name_every_array():
    def kinds(**shapes):
        return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}

    found = differences(kinds(a=(2,), b=(3,), c=()), kinds(b=(4,), c=(), d=(1,)))
    assert found == [
        "a: not in the checkpoint",
        "d: only in the checkpoint",
        "b: float32[4] in the checkpoint, float32[3] in this run",
    ]
    assert "in 3 arrays:\n  a: not in" in str(mismatch(FOLDER, found))
    assert "... and 5 more" in str(mismatch(FOLDER, found[:1] * 25))


def test_arrays_with_other_bits_are_named():
    assert "a, b, c and 1 more of 9 arrays read as other bits" in other_bits(FOLDER, ["a", "b", "c", "d"], 9)


@pytest.mark.parametrize(
    "error",
    [
        ValueError('Error parsing object member "base": Invalid file path: "/a/../b/" [tensorstore_spec=\'{}\']'),
        OSError(errno.ELOOP, os.strerror(errno.ELOOP)),
        OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)),
        RuntimeError("unsupported version"),
    ],
)
def test_does_not_report_damage_if_a_checkpoint_cannot_be_opened(error):
    meant = unreadable(FOLDER, error)
    assert isinstance(meant, CheckpointError)
    assert not isinstance(meant, DamagedCheckpoint)
    assert str(meant).startswith(f"The checkpoint {FOLDER} cannot be opened: {type(error).__name__}: ")
    assert "Nothing shows that it is damaged: keep it." in str(meant)


@unfinished_reads
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
