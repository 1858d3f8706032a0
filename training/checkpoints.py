"""Checkpoints: the whole train state, written while training goes on, restored onto any mesh.

`<directory>/<step>/` is one checkpoint. Orbax writes it under a temporary name and renames it when every process has
written its part, so a folder whose name is a bare number is whole. Inside, each array is stored under its path, such as
"params/blocks/query": neither the Python types of the state nor the mesh that wrote it matter to a reader.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ..layouts.paths import leaves_with_paths
from ..mesh.coordination import exchange
from ..mesh.errors import UserError
from ..mesh.processes import is_main_process, local_copy
from .checksums import checksums
from .exits import TRY_AGAIN
from .known_causes import is_out_of_memory

REMOVED = "removed-"
"""Prefix of a checkpoint on its way out: renamed first, so that a kill during the removal leaves no half checkpoint."""
DAMAGED = "damaged-"
"""Prefix of a checkpoint that could not be restored: kept for whoever wants to look, never restored or counted."""
CHECKSUMS = "checksums"
"""Where a checkpoint keeps those of its arrays, see checksums.py."""
NOT_DAMAGE = frozenset(
    (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
)
"""Errors of the system that say nothing about the files."""
MAX_LISTED = 20
"""Problems listed in one message."""


class CheckpointError(UserError):
    """There is no checkpoint to restore, it is damaged, or it does not fit the state of this run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what was saved: files are missing or cut, or an array has other bits."""


class CheckpointUnavailable(RuntimeError):
    """The machine or the file system does not let a checkpoint be read; nothing says that it is damaged."""

    exit_code = TRY_AGAIN


class Restored(NamedTuple):
    """What `restore_newest` found.

    Attributes:
        step: of the checkpoint.
        state: structured like `abstract_state`.
        damaged: newer steps that could not be used, each with the reason.
    """

    step: int
    state: Any
    damaged: dict[int, str]


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; the ones before it are whole."""

    exit_code = TRY_AGAIN


class Checkpoints:
    """The checkpoints of one run; a context manager that ends with everything written.

    Every process of the run makes one, on the same folder of a file system they share, and calls the same methods.
    """

    def __init__(self, directory: Path, *, keep: int, abstract_state: Any) -> None:
        """Opens a folder of checkpoints; nothing is written or removed before the first `save`.

        Args:
            directory: The folder, shared by all processes; it need not exist.
            keep: Newest checkpoints to keep, at least 1.
            abstract_state: The state as a pytree of ShapeDtypeStructs whose shardings are those of this run.

        Raises:
            UserError: If `keep` is less than 1.
        """
        if keep < 1:
            raise UserError(f"checkpoint.keep={keep} must be at least 1.")
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._abstract_state = abstract_state
        self._saving: int | None = None
        self._failure: SaveFailed | None = None
        self._swept = False
        # Folders made in the background that cannot be made leave Orbax's threads waiting for minutes, at exit too.
        at_once = ocp.AsyncOptions(create_directories_asynchronously=False)
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(async_options=at_once), state=ocp.StandardCheckpointHandler()
        )
        self._orbax = ocp.AsyncCheckpointer(handler, async_options=at_once)
        self._remover = ThreadPoolExecutor(1, "remove-checkpoints")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        elif jax.process_count() == 1:  # of several, the others may never answer
            _noting(error, self.close)

    def steps(self) -> list[int]:
        """Lists the steps whose checkpoints are complete on disk, in order."""
        names = ocp.path.step.standard_name_format()
        return sorted(found.step for found in names.find_all(self._directory)) if self._directory.is_dir() else []

    def latest(self) -> int | None:
        """Gives the newest complete step on disk; None where there is none."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any) -> None:
        """Starts to write a checkpoint, and returns as soon as the state may be changed or donated.

        Waits for the previous save first. A checkpoint of the same step is replaced. The next `save`, `wait` or `close`
        removes all but the newest `keep`, and those of later steps than this, which belong to a course that was left.

        Args:
            step: Optimizer steps done.
            state: Arrays structured like `abstract_state`.

        Raises:
            SaveFailed: If this save could not start, or the previous one failed.
        """
        self.wait()
        self._saving = step
        if is_main_process() and not self._swept:
            self._remove_unfinished()
        self._swept = True
        stored = _stored(state)
        arrays = ocp.args.StandardSave({**stored, CHECKSUMS: checksums(stored)})  # pyright: ignore[reportCallIssue]
        target = self._directory / str(step)
        self._watch(lambda: self._orbax.save(target, args=ocp.args.Composite(state=arrays), force=True))

    def check(self) -> None:
        """Raises the error of a save that failed in the background; cheap enough for every step.

        Raises:
            SaveFailed: If one did.
        """
        self._watch(self._orbax.check_for_errors)

    def wait(self) -> None:
        """Waits until the save under way is complete, and lets those go that are not kept.

        Raises:
            SaveFailed: If it, or one before it, failed.
        """
        self._watch(self._orbax.wait_until_finished)
        if self._saving is not None and is_main_process():
            self._watch(partial(self._remove_old, self._saving))
        self._saving = None

    def close(self) -> None:
        """Waits, and ends the background threads.

        Raises:
            SaveFailed: If a save failed.
        """
        try:
            self.wait()
        finally:
            self._orbax.close()
            self._remover.shutdown()

    def restore(self, step: int | None = None) -> Any:
        """Reads a checkpoint onto the shardings of `abstract_state`, whatever mesh wrote it.

        Args:
            step: A complete step; None for the newest.

        Returns:
            The state, structured like `abstract_state`.

        Raises:
            CheckpointError: If there is no such checkpoint, or its arrays are not those of `abstract_state`; every
                path that differs is named.
            DamagedCheckpoint: If it cannot be read, or an array differs from what was saved.
            CheckpointUnavailable: If the machine or the file system does not let it be read.
        """
        step = self._existing(step)
        folder = self._directory / str(step)
        wanted = dict(leaves_with_paths(self._abstract_state))
        found = self._read(folder, lambda: _arrays_in(self._orbax, folder))
        has_checksums = found.pop(CHECKSUMS, None) is not None  # those of earlier versions have none
        stored = _stored(self._abstract_state)
        problems = _differences(stored, found)
        if problems:
            raise CheckpointError(_mismatch_text(folder, problems))
        request = {**stored, CHECKSUMS: _abstract_checksums(stored)} if has_checksums else stored
        asked = ocp.args.StandardRestore(request)  # pyright: ignore[reportCallIssue]
        read = self._read(folder, lambda: self._orbax.restore(folder, args=ocp.args.Composite(state=asked)))
        arrays = dict(read["state"])
        if has_checksums:
            _compare(folder, arrays.pop(CHECKSUMS), arrays)
        leaves = [arrays[path] if path in found else _empty(leaf) for path, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(self._abstract_state), leaves)

    def restore_newest(self, seconds: float, say: Callable[[str], None] = lambda line: None) -> Restored:
        """Restores the newest checkpoint that all processes can read; what is damaged is passed over, never removed.

        Every process of the run calls this: where one of them finds a checkpoint damaged, all go to the one before.

        Args:
            seconds: How long processes wait for each other.
            say: Gets a line for every checkpoint that is passed over.

        Raises:
            CheckpointError: There is none, all are damaged, or the arrays of one are not those of this run.
            CheckpointUnavailable: The machine or the file system does not let one be read.
            ProcessesMissing: A process did not come to say what it found.
        """
        damaged: dict[int, str] = {}
        steps = self.steps()
        if not steps:
            self._existing(None)
        for step in reversed(steps):
            state, reason = None, ""
            try:
                state = self.restore(step)
            except DamagedCheckpoint as error:
                reason = str(error)
            reasons = exchange(f"restore {step}", reason, seconds=seconds, say=say)
            first = next((rank for rank, each in enumerate(reasons) if each), None)
            if first is None:
                return Restored(step, state, damaged)
            damaged[step] = reasons[first]
            say(f"{reasons[first]} Going back to the checkpoint before it.")
        raise CheckpointError(
            f"No checkpoint in {self._directory} can be used:\n  "
            + "\n  ".join(damaged.values())
            + "\nPut one of them back from a copy, or start anew with --fresh, which moves this run aside."
        )

    def keep_aside(self, steps: Iterable[int]) -> list[Path]:
        """Renames damaged checkpoints, so that they are neither restored nor counted; nothing is removed.

        Args:
            steps: Whose; called by process 0 alone.

        Returns:
            Where they are now.
        """
        moved = []
        for step in steps:
            target = _unused(self._directory / f"{DAMAGED}{step}")
            (self._directory / str(step)).rename(target)
            moved.append(target)
        return moved

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"There is no complete checkpoint in {self._directory}.")
        if step is not None and step not in steps:
            raise CheckpointError(f"There is no complete checkpoint of step {step} in {self._directory}; only {steps}.")
        return steps[-1] if step is None else step

    def _read(self, folder: Path, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:
            if is_out_of_memory(error):
                raise  # the checkpoint is whole: nobody should remove it
            if _error_number(error) in NOT_DAMAGE:
                raise CheckpointUnavailable(
                    f"The checkpoint {folder} cannot be read now: {_reason(error)}. It may well be whole: leave it "
                    "there, mend its permissions or the file system, and start the same command again."
                ) from error
            raise DamagedCheckpoint(f"The checkpoint {folder} is damaged: {_reason(error)}.") from error

    def _watch(self, action: Callable[[], Any]) -> None:
        """Runs something that may raise the error of a save, and raises it again at every later call."""
        if self._failure is not None:
            raise self._failure
        try:
            action()
        except Exception as error:
            self._failure = SaveFailed(
                f"Checkpoint of step {self._saving} could not be written to {self._directory}: {_reason(error)}. "
                f"Complete there: {self.steps() or 'none'}. Make room or repair the file system, then start the same "
                "command again: it resumes from the newest complete checkpoint."
            )
            raise self._failure from error

    def _remove_old(self, saved: int) -> None:
        steps = self.steps()
        kept = [step for step in steps if step <= saved][-self._keep :]
        for step in set(steps) - set(kept):
            leaving = _unused(self._directory / f"{REMOVED}{step}")
            (self._directory / str(step)).rename(leaving)
            self._remover.submit(shutil.rmtree, leaving, ignore_errors=True)

    def _remove_unfinished(self) -> None:
        for pattern in ("*.orbax-checkpoint-tmp*", f"{REMOVED}*"):
            for leftover in self._directory.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)


def _unused(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... that nothing has."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(each for each in chain([path], numbered) if not os.path.lexists(each))


def _error_number(error: BaseException) -> int | None:
    """The system's number of an error, which TensorStore puts into its text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"OS error (\d+)", str(error))
    return int(found.group(1)) if found else None


def _abstract_checksums(stored: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """The array of checksums as it is restored: whole on every device of the state."""
    sharding = next((leaf.sharding for leaf in stored.values()), None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct((len(stored) or 1,), jnp.uint32, sharding=sharding)


def _compare(folder: Path, saved: Any, arrays: Mapping[str, Any]) -> None:
    """Compares restored arrays with their checksums.

    Raises:
        DamagedCheckpoint: Some have other bits; they are named.
    """
    expected, found = (np.asarray(jax.device_get(local_copy(each))) for each in (saved, checksums(arrays)))
    wrong = [path for path, same in zip(sorted(arrays), expected == found, strict=True) if not same]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise DamagedCheckpoint(
            f"The checkpoint {folder} is damaged: {', '.join(wrong[:3])}{more} of {len(arrays)} arrays read as other "
            "bits than were saved (their checksums differ)."
        )


def _arrays_in(orbax: ocp.AsyncCheckpointer, folder: Path) -> dict[str, Any]:
    """What a checkpoint holds, without reading it: path -> something with a shape and a dtype."""
    items = orbax.metadata(folder).item_metadata
    if items is None or items["state"] is None:
        raise OSError("its description is missing")
    return dict(items["state"].tree)


def _stored(state: Any) -> dict[str, Any]:
    """The arrays by path; arrays without elements cannot be stored and need not be."""
    return {path: leaf for path, leaf in leaves_with_paths(state) if leaf.size}


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    missing = [f"{path}: not in the checkpoint" for path in wanted if path not in found]
    extra = [f"{path}: only in the checkpoint" for path in found if path not in wanted]
    changed = [
        f"{path}: {_describe(found[path])} in the checkpoint, {_describe(wanted[path])} in this run"
        for path in wanted
        if path in found and _describe(found[path]) != _describe(wanted[path])
    ]
    return missing + extra + changed


def _describe(array: Any) -> str:
    return f"{jnp.dtype(array.dtype)}{list(array.shape)}"


def _mismatch_text(folder: Path, problems: list[str]) -> str:
    left_out = len(problems) - MAX_LISTED
    listed = problems[:MAX_LISTED] + ([f"... and {left_out} more"] if left_out > 0 else [])
    return (
        f"The checkpoint {folder} does not fit the state of this run, in {len(problems)} array(s):\n  "
        + "\n  ".join(listed)
        + "\nSet model, optimizer and precision.params back to what wrote it, or train into another run.dir. "
        "strategy.data as well, if it has local_steps or compress: its groups keep arrays of their own."
    )


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{' ...' if len(text) > 400 else ''}".rstrip(".")


def _noting(error: BaseException, action: Callable[[], None]) -> None:
    """Runs an action while an error is on its way; a second error becomes a note on the first."""
    try:
        action()
    except Exception as second:
        error.add_note(str(second))
