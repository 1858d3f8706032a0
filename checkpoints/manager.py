"""Saves the checkpoints of one run in the background, restores them, and removes old ones."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata.array_metadata_store import Store

from ..layouts.sizes import array_bytes, format_bytes
from ..mesh.errors import UserError
from ..mesh.files import absolute_path
from ..mesh.known_causes import machine_remedy
from ..mesh.processes import is_main_process
from ..parallel.step.model_order import (
    abstract_in_model_order,
    in_model_order,
    in_stored_order,
    packing_of,
)
from .checksums import checksums_by_path, with_description
from .damage import CheckpointError, DamagedCheckpoint, SaveFailed, leave_errors_to_one_message, reason
from .directory import DAMAGED, REMOVED, UNFINISHED, contents, set_aside
from .identity import SERIES, check_one_series, find_series
from .restore import (
    MODEL_ORDER,
    StoredCheckpoint,
    compared_state,
    mesh_of,
    open_fitting,
    restore_together,
    stored_arrays,
)

MIN_WAIT_SECONDS = 1.0
"""Training logs a wait for the previous save if it takes at least this long."""


class Restored(NamedTuple):
    """The result of `Checkpoints.restore_newest`.

    Attributes:
        step: The step of the checkpoint.
        state: The state, structured like `abstract_state`.
        damaged: Newer steps that could not be used, each with the reason.
    """

    step: int
    state: Any
    damaged: dict[int, str]


class Checkpoints:
    """The checkpoints of one run; a context manager that ends with everything written.

    Every process of the run creates one, for the same directory of a shared file system, and calls the same methods.
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
        """Opens a directory of checkpoints; nothing is written or removed before the first `save`.

        Args:
            directory: The directory, shared by all processes; it need not exist.
            keep: The number of latest checkpoints to keep, at least 1.
            abstract_state: The state as a pytree of ShapeDtypeStructs with the shardings of this run.
            about: Plain values about the run, which every checkpoint contains for `spmdkit checkpoint inspect`.
            save_seconds: The longest that writing one may take in the background before it counts as failed, including
                the wait for its other writes after one has failed.

        Raises:
            UserError: If `keep` is less than 1.
        """
        if keep < 1:
            raise UserError(f"checkpoint.keep={keep} must be at least 1.")
        self._keep, self._save_seconds = keep, save_seconds
        self._abstract_state = abstract_state
        self._abstract_saved = abstract_in_model_order(abstract_state)
        self._directory, self._also_keep = absolute_path(directory), frozenset[int]()
        self._saving: int | None = None
        self._failure: SaveFailed | None = None
        self._series = ""
        self._about, self._description = dict(about or {}), dict[str, Any]()
        self._has_swept, self._restores, self._waited, self._logged = False, 0, 0.0, 0.0
        self._remover = ThreadPoolExecutor(1, "remove-checkpoints")
        leave_errors_to_one_message()
        # If directories cannot be created in the background, Orbax's threads wait for minutes, at exit too.
        at_once = ocp.AsyncOptions(create_directories_asynchronously=False, timeout_secs=save_seconds)
        # Each cut of an array into parts, one for each device with a replica, compiles a program: none below 1 MiB.
        arrays = type_handlers.ArrayHandler(array_metadata_store=Store(), min_slice_bytes_for_replica_parallel=1 << 20)
        registry = type_handlers.create_type_handler_registry((jax.Array, arrays))
        # Compression hardly makes floats smaller, and takes more processor time than the rest of a save together.
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(async_options=at_once),
            state=ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry),
        )
        described = with_description(handler, lambda: self._description)
        # The default store writes in another thread, which nobody waits for after an error.
        store = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
        self._orbax = ocp.AsyncCheckpointer(described, async_options=at_once, checkpoint_metadata_store=store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        elif jax.process_count() == 1:  # of several, the others may never answer
            try:
                self.close()
            except Exception as second:
                error.add_note(str(second))

    def steps(self) -> list[int]:
        """Lists the steps of the checkpoints that are complete on disk, in order."""
        return list(contents(self._directory).steps)

    def latest(self) -> int | None:
        """Returns the latest complete step on disk, or None."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        state: Any,
        log: Callable[[str], None] = lambda line: None,
        *,
        notes: Mapping[str, Any] | None = None,
        also_keep: Iterable[int] = (),
    ) -> None:
        """Starts to write a checkpoint, and returns as soon as the state may be changed or donated.

        Waits for the previous save first, so that no more than one copy of the state exists. A checkpoint of the same
        step is replaced. The next `save`, `wait` or `close` removes all but the latest `keep`, and those of later steps
        than this, which training has left behind by going back.

        Args:
            step: Optimizer steps done.
            state: Arrays structured like `abstract_state`.
            log: Receives a line if training waited for the previous save.
            notes: Plain values that `notes` returns.
            also_keep: Steps whose checkpoints are kept from now on, in addition to the latest `keep`.

        Raises:
            SaveFailed: If this save could not start, or the previous one failed.
        """
        self._also_keep = frozenset(also_keep)
        self._wait_for_previous(step, log)
        self._saving, self._deadline = step, time.monotonic() + self._save_seconds
        if is_main_process():
            if not self._has_swept:
                self._remove(f"*{UNFINISHED}*", f"{REMOVED}*")
            self._watch(partial(self._keep_foreign, step))
            self._watch(self._join_series)
        self._has_swept = True
        arrays = stored_arrays(in_model_order(state))
        description = {
            "step": step,
            "about": self._about,
            "notes": dict(notes or {}),
            "order": MODEL_ORDER,
            "mesh": mesh_of(state),
            "packing": packing_of(state),
            SERIES: self._series,
        }
        self._description = json.loads(json.dumps({**description, "checksums": checksums_by_path(arrays)}))
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays))  # pyright: ignore[reportCallIssue]
        self._watch(partial(self._orbax.save, self._directory / str(step), args=args, force=True))

    def check(self) -> None:
        """Raises the error of a save that failed in the background; cheap enough for every step.

        Raises:
            SaveFailed: If one did.
        """
        self._watch(self._orbax.check_for_errors)

    def wait(self) -> None:
        """Waits until the current save is complete, and removes the checkpoints that are not kept.

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
        with self._remover, closing(self._orbax):
            self.wait()

    def check_fits(self) -> None:
        """Compares the latest intact checkpoint with `abstract_state`, by its description: reads no array.

        Raises:
            CheckpointError: Its arrays are not those of `abstract_state`; every path that differs is named.
            CheckpointUnavailable: The machine or the file system cannot read it.
        """
        for step in reversed(self.steps()):
            with suppress(DamagedCheckpoint):  # `restore_newest` skips it with a message
                open_fitting(self._directory / str(step), self._abstract_saved)
                return

    def restore(self, step: int | None = None) -> Any:
        """Reads a checkpoint onto the shardings of `abstract_state`, whatever mesh wrote it.

        Args:
            step: A complete step; None for the latest.

        Returns:
            The state, structured like `abstract_state`.

        Raises:
            CheckpointError: If the checkpoint is missing, or its arrays are not those of `abstract_state`; every path
                that differs is named.
            DamagedCheckpoint: If it cannot be read, or an array differs from what was saved.
            CheckpointUnavailable: If the machine or the file system cannot read it.
        """
        return self._as_stored(self._compare(self._read(self._existing(step))))

    def restore_newest(self, seconds: float, log: Callable[[str], None] = lambda line: None) -> Restored:
        """Restores the latest checkpoint that all processes can read; damaged ones are skipped, never removed.

        Every process of the run calls this: if one of them finds a checkpoint damaged, all use the one before.

        Args:
            seconds: How long processes wait for each other.
            log: Receives a line for every checkpoint that is skipped.

        Raises:
            CheckpointError: There is none, all are damaged, or the arrays of one are not those of this run.
            CheckpointUnavailable: The machine or the file system cannot read one.
            ProcessesMissing: A process did not report what it found.
        """
        self._restores += 1
        self._existing(None)
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            name = f"{step} of restore {self._restores}"
            state, damage = restore_together(partial(self._read, step), self._compare, name, seconds)
            if not damage:
                return Restored(step, self._as_stored(state), damaged)
            damaged[step] = damage
            log(f"{damage} Going back to the checkpoint before it.")
        raise CheckpointError(
            f"No checkpoint in {self._directory} can be used:\n  "
            + "\n  ".join(damaged.values())
            + "\nReplace one of them by a copy, or start anew with --fresh, which moves this run aside."
        )

    def _read(self, step: int) -> tuple[StoredCheckpoint, dict[str, jax.Array]]:
        stored = open_fitting(self._directory / str(step), self._abstract_saved)
        return stored, stored.restore(stored_arrays(self._abstract_saved))

    def _compare(self, found: tuple[StoredCheckpoint, dict[str, jax.Array]]) -> Any:
        return compared_state(*found, self._abstract_saved)

    def _as_stored(self, saved: Any) -> Any:
        return in_stored_order(saved, self._abstract_state)

    def notes(self, step: int) -> dict[str, Any]:
        """Returns the notes that a checkpoint was saved with.

        Args:
            step: A complete step.

        Raises:
            CheckpointError: The checkpoint is missing.
            DamagedCheckpoint: Its description is missing or was changed.
            CheckpointUnavailable: The machine or the file system cannot read it.
        """
        return StoredCheckpoint(self._directory / str(self._existing(step))).notes

    def keep_aside(self, steps: Iterable[int]) -> list[Path]:
        """Renames damaged checkpoints, so that they are neither restored nor counted; nothing is removed.

        Args:
            steps: The steps of the checkpoints; only process 0 calls this.

        Returns:
            Their new paths.
        """
        return set_aside(self._directory, map(str, steps), DAMAGED)

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"No complete checkpoint in {self._directory}.")
        if step is not None and step not in steps:
            raise CheckpointError(f"No complete checkpoint of step {step} in {self._directory}; only {steps}.")
        check_one_series(self._directory)
        return steps[-1] if step is None else step

    def _join_series(self) -> None:
        """Finds the series of the checkpoints at the first save."""
        if not self._series:
            self._series = find_series(self._about, self._directory)

    def _watch(self, action: Callable[[], Any]) -> None:
        """Runs an action that may raise the error of a save, and raises it again at every later call."""
        if self._failure is not None:
            raise self._failure
        try:
            action()
        except Exception as error:
            self._make_room()
            self._failure = self._save_failed(error)
            raise self._failure from error

    def _save_failed(self, error: Exception) -> SaveFailed:
        """Returns the error of a checkpoint that could not be written, with the complete ones and the free space."""
        there = "What is complete there cannot be listed now."
        with suppress(OSError):
            free = format_bytes(shutil.disk_usage(self._directory).free)
            wanted = sum(array_bytes(leaf.shape, leaf.dtype) for leaf in stored_arrays(self._abstract_saved).values())
            room = f"a checkpoint takes up to {format_bytes(wanted)}, and {free} are free"
            there = f"Complete there: {self.steps() or 'none'}; {room}."
        return SaveFailed(
            f"Checkpoint of step {self._saving} could not be written to {self._directory}: {reason(error)}. {there} "
            f"{machine_remedy(error)}, then start the same command again: it resumes from the latest complete "
            "checkpoint."
        )

    def _make_room(self) -> None:
        """Removes what a failed save has written: if the disk is full, the next command needs the space."""
        if is_main_process() and self._saving is not None:
            for thread in threading.enumerate():  # others may still write, and create removed directories again
                if type(thread).__module__.startswith("orbax."):  # whose own `join` raises their error
                    threading.Thread.join(thread, max(0.0, self._deadline - time.monotonic()))
            self._remove(f"{self._saving}{UNFINISHED}*")

    def _remove(self, *patterns: str) -> None:
        for pattern in patterns:
            for leftover in self._directory.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)

    def _keep_foreign(self, step: int) -> None:
        """Renames anything else with the name of a checkpoint, such as a file, which Orbax would replace."""
        if os.path.lexists(self._directory / str(step)) and step not in self.steps():
            set_aside(self._directory, [str(step)], DAMAGED)

    def _remove_old(self, saved: int) -> None:
        """Removes all but the latest checkpoints, and those of steps after `saved`; process 0 does it for all."""
        steps = self.steps()
        ours = [step for step in steps if step <= saved]
        kept = {*ours[-self._keep :], *self._also_keep.intersection(ours)}
        for leaving in set_aside(self._directory, map(str, sorted({*steps} - kept)), REMOVED):
            self._remover.submit(shutil.rmtree, leaving, ignore_errors=True)

    def _wait_for_previous(self, step: int, log: Callable[[str], None]) -> None:
        begin, previous = time.monotonic(), self._saving
        self.wait()
        seconds = time.monotonic() - begin
        if previous is None or seconds < MIN_WAIT_SECONDS:
            return
        self._waited += seconds
        if self._waited >= 2 * self._logged:  # less and less often
            self._logged = self._waited
            log(
                f"warning: training waited {seconds:.1f} s at step {step} for the checkpoint of step {previous} "
                f"({self._waited:.0f} s in all): writing one takes longer than the steps between two saves. Raise "
                "checkpoint.every, or give run.dir a faster file system."
            )
