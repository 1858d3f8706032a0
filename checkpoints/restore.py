"""Reads checkpoints through Orbax: onto the layouts of any mesh, in whole or in part, or as arrays of the host.

    StoredCheckpoint(folder)        its description: paths, shapes and dtypes, the notes of the run; reads no array
        .restore({path: abstract})  global arrays on the current mesh; each process reads the parts of its devices
        .compare(arrays)            compares them with their checksums; all processes together
        .read(paths)                whole arrays of the host, compared with their checksums

Everything that reads a checkpoint uses these: a resume, `load_run`, a warm start, inspect, verify and export. Orbax has
no public way to read a part of an array without a device for it, so that the host reads arrays one by one.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding

from ..layouts.paths import leaves_with_paths, some
from ..layouts.sizes import array_bytes, format_mesh
from ..mesh.files import absolute_path
from ..mesh.processes import exchange
from ..parallel.pipeline import AXIS
from ..parallel.step.model_order import packing_of
from .checksums import checksums_by_path, host_checksum, read_description
from .damage import (
    CheckpointError,
    DamagedCheckpoint,
    differences,
    leave_errors_to_one_message,
    mismatch,
    reading,
)
from .directory import STATE, display_path
from .identity import ForeignRun, explain_foreign_checkpoint, run_of

MODEL_ORDER = "model"
"""The order of the blocks, in the description of a checkpoint."""
SHARDINGS = "_sharding"
"""Orbax's file about the layouts of the saved arrays."""
AVERAGES = "opt_state/average/"
"""Prefix of the path of a parameter's average; see training/optimizing/averaging.py."""
GROUP_BYTES = 64 << 20
"""Arrays of the host are read together up to this size."""


@cache
def _handler() -> ocp.PyTreeCheckpointHandler:
    leave_errors_to_one_message()
    return ocp.PyTreeCheckpointHandler()


class StoredCheckpoint:
    """A checkpoint on disk, opened for reading.

    Attributes:
        folder: Its directory.
        arrays: Path -> global shape and dtype; the dtype is one of ml_dtypes if NumPy has none.
        checksums: The checksum of each array before it was saved, by path.
        about: Plain values about the run that saved it, see `describe_run`.
        notes: Plain values of the save, such as the state of callbacks.
        step: Optimizer steps done.
        saved: Seconds since 1970 when it was complete.
        run: The identity of the run that saved it; "" if it carries none.
        foreign: The reason why it is not of the run in whose directory it is; "" if it is.
        packing: See `compression.packing`; None if the checkpoint does not record it.
    """

    def __init__(self, folder: Path, *, of_any_run: bool = False) -> None:
        """Reads and checks the description.

        Args:
            folder: The directory of the checkpoint.
            of_any_run: Whether it may be of another run than its directory, so that it can be described.

        Raises:
            ForeignRun: It is of another run than its directory.
            DamagedCheckpoint: The description is missing or was changed.
            CheckpointUnavailable: The machine or the file system cannot read it.
            CheckpointError: It cannot be opened for another reason.
        """
        self.folder = absolute_path(folder)
        with reading(self.folder):
            description = read_description(self.folder)
            tree: dict[str, Any] = dict(_handler().metadata(epath.Path(self.folder / STATE)).tree)
            self.about: dict[str, Any] = description["about"]
            self.notes: dict[str, Any] = description["notes"]
            self.step: int = description["step"]
            self.saved: float = description["saved"]
            self.checksums: dict[str, int] = description["checksums"]
            self.run: str = run_of(self.about)
            self.foreign = explain_foreign_checkpoint(self.folder, self.step, self.run)
            self._mesh: dict[str, int] = description.get("mesh", {})
            self._order: str = description.get("order", "")
            self.packing: str | None = description.get("packing")
        if self.foreign and not of_any_run:
            raise ForeignRun(self.foreign)
        self.arrays = {
            path: jax.ShapeDtypeStruct(tuple(array.shape), np.dtype(array.dtype)) for path, array in tree.items()
        }

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh that saved it: axis -> size, without axes of size 1; empty if it did not record it."""
        return self.about.get("mesh", self._mesh)

    def check_order(self) -> None:
        """Checks that blocks are in the model's order: others than runs of a config once saved them as they were.

        Raises:
            CheckpointError: A pipeline saved it from Python, and the order of its blocks is unknown.
        """
        if self._order == MODEL_ORDER or "mesh" in self.about:
            return
        with reading(self.folder):
            shardings = json.loads((self.folder / STATE / SHARDINGS).read_bytes())
        for sharding in map(json.loads, shardings.values()):
            sizes = dict(zip(sharding.get("axis_names", ()), sharding.get("shape", ()), strict=True))
            if sizes.get(AXIS, 1) > 1:
                raise CheckpointError(
                    f"The checkpoint {self.folder} was saved from Python on {sizes[AXIS]} pipeline stages, by a "
                    "version of spmdkit that kept blocks in the order of the stages and did not record it. Restore it "
                    "with that version on the mesh that wrote it, and save it from a mesh without a pipeline."
                )

    def num_bytes(self, *paths: str) -> int:
        """Returns the bytes of some arrays in memory."""
        return sum(array_bytes(self.arrays[path].shape, self.arrays[path].dtype) for path in paths)

    def read(self, paths: Sequence[str]) -> dict[str, np.ndarray]:
        """Reads whole arrays into memory, and compares them with their checksums.

        Args:
            paths: The paths of the arrays.

        Raises:
            DamagedCheckpoint: An array cannot be read, or has other bits than were saved.
            CheckpointUnavailable: The machine or the file system cannot read it.
        """
        arrays = self._restore({path: ocp.RestoreArgs(restore_type=np.ndarray) for path in paths})
        self._check({path: host_checksum(array) for path, array in arrays.items()})
        return arrays

    def groups(self, paths: Iterable[str]) -> Iterator[list[str]]:
        """Divides paths into groups that `read` takes at once, of small arrays together or of one large array."""
        group: list[str] = []
        num_bytes = 0
        for path in paths:
            if group and num_bytes + self.num_bytes(path) > GROUP_BYTES:
                yield group
                group, num_bytes = [], 0
            group.append(path)
            num_bytes += self.num_bytes(path)
        if group:
            yield group

    def restore(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Reads arrays onto their devices, and waits for no other process.

        Args:
            abstract: Path -> shape, dtype and sharding, which must be those of `arrays`, but for the sharding.

        Returns:
            Global arrays, which `compare` has yet to compare with their checksums.

        Raises:
            CheckpointError: The order of its blocks is unknown.
            DamagedCheckpoint: An array cannot be read.
            CheckpointUnavailable: The machine or the file system cannot read it.
        """
        self.check_order()
        return self._restore(ocp.checkpoint_utils.construct_restore_args(dict(abstract))) if abstract else {}

    def compare(self, arrays: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Compares restored arrays with their checksums; all processes call this together.

        Args:
            arrays: Path -> global array.

        Returns:
            The same arrays.

        Raises:
            DamagedCheckpoint: Some have other bits than were saved; they are named.
        """
        self._check(checksums_by_path(arrays))
        return arrays

    def averages(self) -> dict[str, str]:
        """Returns the path of a parameter -> the path of its average; frozen parameters have none.

        Raises:
            CheckpointError: The checkpoint contains no averages.
        """
        found = {path.removeprefix(AVERAGES): path for path in self.arrays if path.startswith(AVERAGES)}
        if not found:
            raise CheckpointError(
                f"The checkpoint {display_path(self.folder)} contains no averages of its parameters: its run was "
                "trained without optimizer.ema.decay. Omit --ema (in Python ema=True), or train with "
                "optimizer.ema={decay: 0.999}."
            )
        return found

    def _check(self, found: Mapping[str, int]) -> None:
        if wrong := [path for path, checksum in found.items() if checksum != self.checksums[path]]:
            raise DamagedCheckpoint(
                f"The checkpoint {self.folder} is damaged: {some(wrong)} of {len(found)} arrays read as other bits "
                "than were saved (their checksums differ)."
            )

    def _restore(self, how: Mapping[str, ocp.RestoreArgs]) -> dict[str, Any]:
        request = dict.fromkeys(how, 0)
        args = ocp.args.PyTreeRestore(request, restore_args=dict(how), partial_restore=True)  # pyright: ignore[reportCallIssue]
        with reading(self.folder):
            # `Checkpointer.restore` adds a barrier: a process without damage would wait for one that found some.
            return dict(_handler().restore(epath.Path(self.folder / STATE), args=args))


def stored_arrays(state: Any) -> dict[str, Any]:
    """Returns the arrays of a state by path, without empty arrays, which Orbax cannot store."""
    return {path: leaf for path, leaf in leaves_with_paths(state) if leaf.size}


def mesh_of(state: Any) -> dict[str, int]:
    """Returns the mesh of a state: axis -> size, without axes of size 1; empty for one device."""
    for leaf in jax.tree.leaves(state):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return {axis: size for axis, size in sharding.mesh.shape.items() if size > 1}
    return {}


def _belong_to_devices(problems: Sequence[str]) -> bool:
    """Returns True if arrays differ that groups or devices have for themselves, and none of the model."""
    changed = [line for line in problems if line.startswith("extra/") and line.endswith("in this run")]
    return bool(changed) and all(line.startswith(("extra/", "opt_state/")) for line in problems)


def open_fitting(folder: Path, abstract_state: Any) -> StoredCheckpoint:
    """Opens a checkpoint and compares its arrays with those of a state, without reading them.

    Args:
        folder: The directory of the checkpoint.
        abstract_state: A pytree of ShapeDtypeStructs.

    Raises:
        CheckpointError: Its directory has the name of another step, or its arrays differ from those of the state;
            every path that differs is named.
        DamagedCheckpoint, CheckpointUnavailable: As `StoredCheckpoint`.
    """
    stored = StoredCheckpoint(folder)
    if str(stored.step) != folder.name:
        raise CheckpointError(
            f"The checkpoint {folder} was renamed: it is the state of step {stored.step}. Give its directory the name "
            f"{stored.step} again."
        )
    stored.check_order()
    problems = differences(stored_arrays(abstract_state), stored.arrays)
    if problems and stored.mesh != mesh_of(abstract_state) and _belong_to_devices(problems):
        raise mismatch(
            f"The mesh has changed from {format_mesh(stored.mesh)}, which wrote the checkpoint {folder}, to "
            f"{format_mesh(mesh_of(abstract_state))}, and so has the state",
            problems,
            "With strategy.data.local_steps or compress, each group or device along data keeps arrays of its own. "
            f"Restore the checkpoint on {format_mesh(stored.mesh)}, or start a new run from its parameters "
            "(checkpoint.start_from).",
        )
    if problems:
        raise mismatch(
            f"The checkpoint {folder} does not fit the state of this run",
            problems,
            "Set model, optimizer, precision.params, precision.compute, precision.loss_scale and callbacks that change "
            "the learning rate back to what wrote it, or train into another run.dir. strategy.data as well, if it has "
            "local_steps or compress: its groups keep arrays of their own.",
        )
    if stored.packing is not None and stored.packing != packing_of(abstract_state):
        raise CheckpointError(
            f"The checkpoint {folder} was written on {format_mesh(stored.mesh)}, and this run has "
            f"{format_mesh(mesh_of(abstract_state))}, other layouts or other pipeline stages. With "
            "strategy.data.compress, each device keeps the rounding errors of its own part of the gradients, and these "
            "parts have changed. Restore the checkpoint with the strategy and layouts that wrote it, or start a new "
            "run from its parameters (checkpoint.start_from)."
        )
    return stored


def compared_state(stored: StoredCheckpoint, arrays: Mapping[str, jax.Array], abstract_state: Any) -> Any:
    """Returns restored arrays as a state, compared with their checksums; all processes call this together.

    The checksums are compared by path in the state that training gets, not in what was read.

    Raises:
        DamagedCheckpoint: Some arrays have other bits than were saved; they are named.
    """
    state = _as_tree(arrays, abstract_state)
    stored.compare(stored_arrays(state))
    return state


def _as_tree(arrays: Mapping[str, jax.Array], abstract: Any) -> Any:
    """Puts arrays into the structure of `abstract`; empty arrays are made."""
    leaves = [
        arrays[path] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        for path, leaf in leaves_with_paths(abstract)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def read_tree(stored: StoredCheckpoint, group: str, abstract: Any) -> Any:
    """Reads one part of the state, onto the layouts of any mesh; all processes call this together.

    Args:
        stored: The checkpoint.
        group: "params", or another field of the train state.
        abstract: Shapes, dtypes and shardings of the part, in the model's own order of blocks.

    Returns:
        Global arrays, structured and laid out like `abstract`.

    Raises:
        CheckpointError: The checkpoint has other arrays; every path that differs is named.
        DamagedCheckpoint: An array cannot be read, or has other bits than were saved.
        CheckpointUnavailable: The machine or the file system cannot read it.
    """
    wanted = stored_arrays({group: abstract})
    held = [path for path in stored.arrays if path.split("/")[0] == group]
    return _as_tree(_read(stored, group, wanted, held), {group: abstract})[group]


def read_averages(stored: StoredCheckpoint, abstract: Any) -> Any:
    """Reads the averages of the parameters that a run kept (`optimizer.ema`); for a frozen parameter, the parameter.

    Args:
        stored: The checkpoint.
        abstract: Shapes, dtypes and shardings of the parameters, in the model's own order of blocks.

    Returns:
        Global arrays, structured and laid out like `abstract`, with the same dtypes.

    Raises:
        CheckpointError: The checkpoint lacks averages, or those of other parameters.
        DamagedCheckpoint, CheckpointUnavailable: As `read_tree`.
    """
    names = stored.averages()
    wanted = {}
    for path, leaf in stored_arrays(abstract).items():
        dtype = jnp.promote_types(leaf.dtype, jnp.float32) if path in names else leaf.dtype
        stored_as = names.get(path, f"params/{path}")
        wanted[stored_as] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    held = [path for path in dict.fromkeys([*wanted, *names.values()]) if path in stored.arrays]
    arrays = _read(stored, "averages", wanted, held)
    by_path = {path: arrays[names.get(path, f"params/{path}")] for path in stored_arrays(abstract)}
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), _as_tree(by_path, abstract), abstract)


def _read(stored: StoredCheckpoint, what: str, wanted: Mapping[str, Any], held: Sequence[str]) -> Mapping[str, Any]:
    if problems := differences(wanted, {path: stored.arrays[path] for path in held}):
        raise mismatch(
            f"The checkpoint {stored.folder} holds other {what} than the model of its config has",
            problems,
            "Set model and precision.params back to what wrote it, and data if that determines the sizes of the model.",
        )
    return stored.compare(stored.restore(wanted))


def restore_together(
    read: Callable[[], Any], compare: Callable[[Any], Any], name: str, seconds: float
) -> tuple[Any, str]:
    """Reads and compares arrays in all processes together; the first damage that one of them finds counts for all.

    Args:
        read: Reads the parts of this process; may raise DamagedCheckpoint.
        compare: Receives what `read` returns, and compares checksums, which all processes compute together: only called
            if each has read its part.
        name: The name of this check: the same in every process, another for every check.
        seconds: How long processes wait for each other.

    Returns:
        The result of `compare`, and the damage or "".

    Raises:
        ProcessesMissing: A process did not report what it found.
    """
    result: Any = None
    for phase, action in (("read", lambda _: read()), ("compare", compare)):
        damage = ""
        try:
            result = action(result)
        except DamagedCheckpoint as error:
            damage = str(error)
        if found := next(filter(None, exchange(f"{phase} {name}", damage, seconds=seconds)), ""):
            return None, found
    return result, ""
