"""Checkpoints: the whole train state, written while training goes on, restored onto any mesh.

`<directory>/<step>/` is one checkpoint. Orbax writes it under a temporary name and renames it when every process has
written its part, so a folder whose name is a bare number is whole. Inside, each array is stored under its path, such as
"params/blocks/query": neither the Python types of the state nor the mesh that wrote it matter to a reader.
"""

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from ...layouts.paths import leaves_with_paths
from ...layouts.sizes import array_bytes, format_bytes
from ...mesh.coordination import exchange
from ...mesh.errors import UserError
from ...mesh.processes import is_main_process, local_copy
from ..ending.exits import TRACEBACK_VARIABLE
from .checksums import checksums
from .errors import CheckpointError as CheckpointError
from .errors import CheckpointUnavailable as CheckpointUnavailable
from .errors import DamagedCheckpoint as DamagedCheckpoint
from .errors import SaveFailed as SaveFailed
from .errors import differences, mismatch, other_bits, reason, unreadable
from .folder import CHECKSUMS, DAMAGED, REMOVED, UNFINISHED, contents, set_aside

ABOUT, NOTES = "spmdkit", "notes"
"""Where the description of a checkpoint keeps what its run says of itself, and the notes of a save."""
NOTICED_SECONDS = 1.0
"""How long training waits for the previous save before that is told."""


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


class Checkpoints:
    """The checkpoints of one run; a context manager that ends with everything written.

    Every process of the run makes one, on the same folder of a file system they share, and calls the same methods.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        abstract_state: Any,
        about: Mapping[str, Any] | None = None,
        save_seconds: int = 1200,
    ) -> None:
        """Opens a folder of checkpoints; nothing is written or removed before the first `save`.

        Args:
            directory: The folder, shared by all processes; it need not exist.
            keep: Newest checkpoints to keep, at least 1.
            abstract_state: The state as a pytree of ShapeDtypeStructs whose shardings are those of this run.
            about: What every checkpoint says of the run that saved it, for `spmdkit checkpoint inspect`: plain values.
            save_seconds: The longest that writing one may take in the background before it counts as failed.

        Raises:
            UserError: If `keep` is less than 1.
        """
        if keep < 1:
            raise UserError(f"checkpoint.keep={keep} must be at least 1.")
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._abstract_state = abstract_state
        self._also_keep: frozenset[int] = frozenset()
        self._saving: int | None = None
        self._failure: SaveFailed | None = None
        self._swept = False
        self._restores = 0
        self._about = {ABOUT: dict(about)} if about else {}
        self._waited = self._told = 0.0
        _leave_errors_to_one_message()
        # Folders made in the background that cannot be made leave Orbax's threads waiting for minutes, at exit too.
        at_once = ocp.AsyncOptions(create_directories_asynchronously=False, timeout_secs=save_seconds)
        # Floats hardly become smaller by compression, which takes more processor time than all else of a save together.
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(async_options=at_once),
            state=ocp.PyTreeCheckpointHandler(use_compression=False),
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
        return list(contents(self._directory).steps)

    def latest(self) -> int | None:
        """Gives the newest complete step on disk; None where there is none."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        state: Any,
        say: Callable[[str], None] = lambda line: None,
        *,
        notes: Mapping[str, Any] | None = None,
        also_keep: Iterable[int] = (),
    ) -> None:
        """Starts to write a checkpoint, and returns as soon as the state may be changed or donated.

        Waits for the previous save first, so that no more than one copy of the state is ever held. A checkpoint of the
        same step is replaced. The next `save`, `wait` or `close` removes all but the newest `keep`, and those of later
        steps than this, which belong to a course that was left.

        Args:
            step: Optimizer steps done.
            state: Arrays structured like `abstract_state`.
            say: Gets a line where training had to wait for the previous save.
            notes: Plain values that `notes` gives back.
            also_keep: Steps whose checkpoints stay, from now on, beside the newest `keep`.

        Raises:
            SaveFailed: If this save could not start, or the previous one failed.
        """
        self._also_keep = frozenset(also_keep)
        self._wait_for_previous(step, say)
        self._saving = step
        if is_main_process() and not self._swept:
            self._remove_unfinished()
        self._swept = True
        if is_main_process():
            self._watch(partial(self._keep_foreign, step))
        stored = _stored(state)
        arrays = ocp.args.PyTreeSave({**stored, CHECKSUMS: checksums(stored)})  # pyright: ignore[reportCallIssue]
        target = self._directory / str(step)
        composite = ocp.args.Composite(state=arrays)
        about = {**self._about, **({NOTES: dict(notes)} if notes else {})}
        self._watch(lambda: self._orbax.save(target, args=composite, force=True, custom_metadata=about or None))

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
            try:
                self._orbax.close()
            finally:
                self._remover.shutdown()
                if self._failure is not None:
                    self._make_room()  # once more: now no thread writes any longer

    def check_fits(self) -> None:
        """Compares what the newest checkpoint holds with `abstract_state`, from its description alone: reads no array.

        Raises:
            CheckpointError: Its arrays are not those of `abstract_state`; every path that differs is named.
            CheckpointUnavailable: The machine or the file system does not let it be read.
        """
        for step in reversed(self.steps()):
            with suppress(DamagedCheckpoint):  # `restore_newest` passes it over, and says so
                self._description(self._directory / str(step))
                return

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
        folder = self._directory / str(self._existing(step))
        arrays = self._read_arrays(folder)
        _compare(folder, arrays)
        return self._as_state(arrays)

    def _description(self, folder: Path) -> dict[str, Any]:
        """What a checkpoint holds, which has to be what this run needs: path -> something with a shape and a dtype."""
        found = self._read(folder, lambda: _arrays_in(self._orbax, folder))
        held = {path: array for path, array in found.items() if path != CHECKSUMS}
        problems = differences(_stored(self._abstract_state), held)
        if problems:
            raise mismatch(folder, problems)
        return found

    def _read_arrays(self, folder: Path) -> dict[str, Any]:
        """The arrays by path, with their checksums where there are some; waits for no other process."""
        request = _stored(self._abstract_state)
        if CHECKSUMS in self._description(folder):  # those of earlier versions have none
            request[CHECKSUMS] = _abstract_checksums(request)
        how = ocp.checkpoint_utils.construct_restore_args(request)
        asked = ocp.args.PyTreeRestore(request, restore_args=how)  # pyright: ignore[reportCallIssue]
        # Of the checkpointer's own `restore` the rest is a barrier: whoever finds no damage would wait for who does.
        handler, path = self._orbax.handler, epath.Path(folder)
        return dict(self._read(folder, lambda: handler.restore(path, args=ocp.args.Composite(state=asked)))["state"])

    def _as_state(self, arrays: Mapping[str, Any]) -> Any:
        wanted = leaves_with_paths(self._abstract_state)
        leaves = [arrays[path] if path in arrays else _empty(leaf) for path, leaf in wanted]
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
        self._restores += 1
        steps = self.steps()
        if not steps:
            self._existing(None)
        for step in reversed(steps):
            folder, arrays = self._directory / str(step), {}

            def read(folder: Path = folder, arrays: dict[str, Any] = arrays) -> None:
                arrays.update(self._read_arrays(folder))

            def compare(folder: Path = folder, arrays: dict[str, Any] = arrays) -> None:
                _compare(folder, arrays)

            # Checksums are computed by all processes together: only where each of them has read its part.
            name = f"{step} of restore {self._restores}"
            damage = _damage(read, f"read {name}", seconds, say) or _damage(compare, f"compare {name}", seconds, say)
            if not damage:
                return Restored(step, self._as_state(arrays), damaged)
            damaged[step] = damage
            say(f"{damage} Going back to the checkpoint before it.")
        raise CheckpointError(
            f"No checkpoint in {self._directory} can be used:\n  "
            + "\n  ".join(damaged.values())
            + "\nPut one of them back from a copy, or start anew with --fresh, which moves this run aside."
        )

    def notes(self, step: int) -> dict[str, Any]:
        """Gives the notes that a checkpoint was saved with; nothing where it has none.

        Args:
            step: A complete step.

        Raises:
            CheckpointError: There is no such checkpoint.
            DamagedCheckpoint: Its description is missing or cannot be understood.
            CheckpointUnavailable: The machine or the file system does not let it be read.
        """
        folder = self._directory / str(self._existing(step))
        found = self._read(folder, lambda: self._orbax.metadata(folder).custom_metadata) or {}
        return dict(found.get(NOTES) or {})

    def keep_aside(self, steps: Iterable[int]) -> list[Path]:
        """Renames damaged checkpoints, so that they are neither restored nor counted; nothing is removed.

        Args:
            steps: Whose; called by process 0 alone.

        Returns:
            Where they are now.
        """
        return set_aside(self._directory, map(str, steps), DAMAGED)

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
            meant = unreadable(folder, error)
            if meant is error:
                raise
            raise meant from error

    def _watch(self, action: Callable[[], Any]) -> None:
        """Runs something that may raise the error of a save, and raises it again at every later call."""
        if self._failure is not None:
            raise self._failure
        try:
            action()
        except Exception as error:
            self._make_room()
            self._failure = SaveFailed(
                f"Checkpoint of step {self._saving} could not be written to {self._directory}: {reason(error)}. "
                f"{self._what_is_there()} Make room or repair the file system, then start the same command again: it "
                "resumes from the newest complete checkpoint."
            )
            raise self._failure from error

    def _wait_for_previous(self, step: int, say: Callable[[str], None]) -> None:
        begin, previous = time.monotonic(), self._saving
        self.wait()
        seconds = time.monotonic() - begin
        if previous is None or seconds < NOTICED_SECONDS:
            return
        self._waited += seconds
        if self._waited >= 2 * self._told:  # seldom, the longer it goes on
            self._told = self._waited
            say(
                f"warning: training waited {seconds:.1f} s at step {step} for the checkpoint of step {previous} "
                f"({self._waited:.0f} s in all): writing one takes longer than the steps between two saves. Raise "
                "checkpoint.every, or give run.dir a faster file system."
            )

    def _make_room(self) -> None:
        """Removes what a failed save has written: where the disk is full, the next command needs the room."""
        if is_main_process() and self._saving is not None:
            for leftover in self._directory.glob(f"{self._saving}{UNFINISHED}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def _what_is_there(self) -> str:
        """For the message of a failed save: what is complete, and the room."""
        with suppress(OSError):
            wanted = sum(array_bytes(leaf.shape, leaf.dtype) for leaf in _stored(self._abstract_state).values())
            free = shutil.disk_usage(self._directory).free
            room = f"a checkpoint takes up to {format_bytes(wanted)}, and {format_bytes(free)} are free"
            return f"Complete there: {self.steps() or 'none'}; {room}."
        return "What is complete there cannot be seen now."

    def _remove_old(self, saved: int) -> None:
        steps = self.steps()
        ours = [step for step in steps if step <= saved]
        kept = {*ours[-self._keep :], *self._also_keep.intersection(ours)}
        for leaving in set_aside(self._directory, map(str, sorted({*steps} - kept)), REMOVED):
            self._remover.submit(shutil.rmtree, leaving, ignore_errors=True)

    def _keep_foreign(self, step: int) -> None:
        """Renames what has the name of a checkpoint and is none, such as a file: Orbax would replace it."""
        if os.path.lexists(self._directory / str(step)) and step not in self.steps():
            set_aside(self._directory, [str(step)], DAMAGED)

    def _remove_unfinished(self) -> None:
        for pattern in (f"*{UNFINISHED}*", f"{REMOVED}*"):
            for leftover in self._directory.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)


@cache
def _leave_errors_to_one_message() -> None:
    """What Orbax and TensorStore print of a failure, with tracebacks, would come before the message that says it.

    Orbax logs it. Where one of several reads or writes fails, it closes its event loop with the others still under way;
    each of these finds the loop closed, with a traceback that TensorStore hands to `sys.unraisablehook`.
    """
    if os.environ.get(TRACEBACK_VARIABLE, "0") != "0":
        return
    logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)
    # Of several tasks that fail, asyncio says of all but one that nobody asked how they ended.
    logging.getLogger("asyncio").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.getMessage())
    before = sys.unraisablehook

    def hook(raised: Any) -> None:
        if not (raised.exc_type is RuntimeError and str(raised.exc_value) == "Event loop is closed"):
            before(raised)

    sys.unraisablehook = hook


def _abstract_checksums(stored: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """The array of checksums as it is restored: whole on every device of the state."""
    sharding = next((leaf.sharding for leaf in stored.values()), None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct((len(stored) or 1,), jnp.uint32, sharding=sharding)


def _damage(action: Callable[[], None], name: str, seconds: float, say: Callable[[str], None]) -> str:
    """Does something that may find a checkpoint damaged, as all processes do; gives what the first finds, or ""."""
    found = ""
    try:
        action()
    except DamagedCheckpoint as error:
        found = str(error)
    return next((each for each in exchange(name, found, seconds=seconds, say=say) if each), "")


def _compare(folder: Path, arrays: dict[str, Any]) -> None:
    """Compares restored arrays with their checksums, which are taken out; all processes do it together.

    Raises:
        DamagedCheckpoint: Some have other bits; they are named.
    """
    saved = arrays.pop(CHECKSUMS, None)
    if saved is None:
        return
    expected, found = (np.asarray(jax.device_get(local_copy(each))) for each in (saved, checksums(arrays)))
    wrong = [path for path, same in zip(sorted(arrays), expected == found, strict=True) if not same]
    if wrong:
        raise DamagedCheckpoint(other_bits(folder, wrong, len(arrays)))


def _arrays_in(orbax: ocp.AsyncCheckpointer, folder: Path) -> dict[str, Any]:
    """What a checkpoint holds, without reading it: path -> something with a shape and a dtype."""
    (folder / "state" / "_METADATA").read_bytes()  # Orbax takes what it may not read for something that is not there
    os.listdir(folder)  # Orbax takes what may not be read for what is not there
    items = orbax.metadata(folder).item_metadata
    if items is None or items["state"] is None:
        raise OSError("its description is missing")
    return dict(items["state"].tree)


def _stored(state: Any) -> dict[str, Any]:
    """The arrays by path; arrays without elements cannot be stored and need not be."""
    return {path: leaf for path, leaf in leaves_with_paths(state) if leaf.size}


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)


def _noting(error: BaseException, action: Callable[[], None]) -> None:
    """Runs an action while an error is on its way; a second error becomes a note on the first."""
    try:
        action()
    except Exception as second:
        error.add_note(str(second))
