"""Checkpoints: the whole train state, written while training goes on, restored onto any mesh.

`<directory>/<step>/` is one checkpoint. Orbax writes it under a temporary name and renames it when every process has
written its part, so a folder whose name is a bare number is whole. Inside, each array is stored under its path, such as
"params/blocks/query": neither the Python types of the state nor the mesh that wrote it matter to a reader.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from ...layouts.sizes import array_bytes
from ...mesh.errors import UserError
from ...mesh.files import absolute_path
from ...mesh.processes import is_main_process
from .checksums import checksums
from .description import with_description
from .errors import CheckpointError as CheckpointError
from .errors import CheckpointUnavailable as CheckpointUnavailable
from .errors import DamagedCheckpoint as DamagedCheckpoint
from .errors import SaveFailed as SaveFailed
from .errors import save_failed
from .folder import CHECKSUMS, DAMAGED, contents, set_aside
from .newest import Restored, restore_newest
from .quiet import leave_errors_to_one_message
from .reading import ABOUT, NOTES, Reader, stored
from .retention import Retention, keep_foreign, remove_leftovers, remove_unfinished

NOTICED_SECONDS = 1.0
"""How long training waits for the previous save before that is told."""


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
        self._directory = absolute_path(directory)
        self._abstract_state = abstract_state
        self._also_keep: frozenset[int] = frozenset()
        self._saving: int | None = None
        self._failure: SaveFailed | None = None
        self._swept = False
        self._restores = 0
        self._about = {ABOUT: dict(about)} if about else {}
        self._waited = self._told = 0.0
        leave_errors_to_one_message()
        # Folders made in the background that cannot be made leave Orbax's threads waiting for minutes, at exit too.
        at_once = ocp.AsyncOptions(create_directories_asynchronously=False, timeout_secs=save_seconds)
        # Floats hardly become smaller by compression, which takes more processor time than all else of a save together.
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(async_options=at_once),
            state=ocp.PyTreeCheckpointHandler(use_compression=False),
        )
        self._orbax = ocp.AsyncCheckpointer(with_description(handler), async_options=at_once)
        self._reader = Reader(self._orbax, abstract_state)
        self._retention = Retention(self._directory, keep)

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
            remove_leftovers(self._directory)
        self._swept = True
        if is_main_process():
            self._watch(partial(keep_foreign, self._directory, step))
        arrays = stored(state)
        tree = ocp.args.PyTreeSave({**arrays, CHECKSUMS: checksums(arrays)})  # pyright: ignore[reportCallIssue]
        target, args = self._directory / str(step), ocp.args.Composite(state=tree)
        about = {**self._about, **({NOTES: dict(notes)} if notes else {})} or None
        self._watch(partial(self._orbax.save, target, args=args, force=True, custom_metadata=about))

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
            self._watch(partial(self._retention.remove_old, self._saving, self._also_keep))
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
                self._retention.close()
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
                self._reader.description(self._directory / str(step))
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
        return self._reader.checked_state(folder, self._reader.arrays(folder))

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
        self._restores += 1
        steps = self.steps()
        if not steps:
            self._existing(None)
        name = f"restore {self._restores}"
        return restore_newest(self._reader, self._directory, reversed(steps), name, seconds, say)

    def notes(self, step: int) -> dict[str, Any]:
        """Gives the notes that a checkpoint was saved with; nothing where it has none.

        Args:
            step: A complete step.

        Raises:
            CheckpointError: There is no such checkpoint.
            DamagedCheckpoint: Its description is missing or cannot be understood.
            CheckpointUnavailable: The machine or the file system does not let it be read.
        """
        return self._reader.notes(self._directory / str(self._existing(step)))

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

    def _watch(self, action: Callable[[], Any]) -> None:
        """Runs something that may raise the error of a save, and raises it again at every later call."""
        if self._failure is not None:
            raise self._failure
        try:
            action()
        except Exception as error:
            self._make_room()
            wanted = sum(array_bytes(leaf.shape, leaf.dtype) for leaf in stored(self._abstract_state).values())
            self._failure = save_failed(self._directory, self._saving, error, wanted)
            raise self._failure from error

    def _make_room(self) -> None:
        if is_main_process() and self._saving is not None:
            remove_unfinished(self._directory, self._saving)

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


def _noting(error: BaseException, action: Callable[[], None]) -> None:
    """Runs an action while an error is on its way; a second error becomes a note on the first."""
    try:
        action()
    except Exception as second:
        error.add_note(str(second))
