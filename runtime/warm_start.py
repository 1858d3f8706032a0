"""`checkpoint.start_from`: a new run begins with the parameters of another, and with nothing else of its state.

    taken over      every parameter of the same path and shape; its dtype becomes that of this run
    initialized     parameters that `checkpoint.start_fresh` matches, and low-rank adapters if the other run had none
    error           everything else: parameters that are missing there, are not here, or have another shape

Each device reads its own part of an array from disk: no process holds a whole one. All processes compare the arrays
with their checksums before the first step.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoints.damage import DamagedCheckpoint, differences, mismatch
from ..checkpoints.directory import display_path, find
from ..checkpoints.restore import StoredCheckpoint, restore_together, stored_arrays
from ..configs.schema import CheckpointConfig
from ..layouts.paths import leaves_with_paths, map_with_path, match_paths, some
from ..layouts.sizes import counted
from ..mesh.keys import make_key
from ..models.lora import NAME as ADAPTERS
from ..parallel.model import BlockModel, Model, Params
from .process_check import agree, short_hash

GROUP = "params/"


class WarmStart:
    """The parameters that a new run begins with, from a checkpoint of another run."""

    def __init__(
        self, checkpoint: CheckpointConfig, model: Model | BlockModel, abstract: Params, *, seed: int, seconds: float
    ) -> None:
        """Compares the parameters of the checkpoint with those of the model, without reading an array.

        Args:
            checkpoint: The section `checkpoint`, which names the other run and the parameters that are initialized.
            model: The model of this run.
            abstract: Shapes, dtypes and shardings of its parameters, in the model's own order of blocks.
            seed: The seed of this run, for parameters that are initialized.
            seconds: How long processes wait for each other.

        Raises:
            CheckpointError: The checkpoint is missing, or parameters do not fit; all are named.
            UserError: An expression of `checkpoint.start_fresh` matches no parameter.
            Disagreement: The processes of this run see different checkpoints there.
            ProcessesMissing: Some did not answer in time.
            CheckpointUnavailable: The machine or the file system cannot read it.
        """
        self._model, self._wanted, self._seed, self._seconds = model, abstract, seed, seconds
        self._reads = 0
        try:
            self._stored = StoredCheckpoint(find(checkpoint.start_from).one)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(_with_advice(error)) from error
        checksums = short_hash(repr(sorted(self._stored.checksums.items())))
        mine = f"{self._stored.folder.name} (checksums {checksums})"  # hosts may see different latest checkpoints
        fix = "Name one of its steps, as <run>/<step>, by an absolute path on a file system that all hosts mount"
        agree("the checkpoint to start from", {"the step of checkpoint.start_from": mine}, seconds, fix)
        wanted = stored_arrays(abstract)
        held = {
            path.removeprefix(GROUP): array for path, array in self._stored.arrays.items() if path.startswith(GROUP)
        }
        matched = match_paths(checkpoint.start_fresh, list({**wanted, **held}), "checkpoint.start_fresh")
        adapters = [] if _has_adapters(held) else [path for path in wanted if _has_adapters([path])]
        self._initialized = frozenset([*adapters, *(path for found in matched.values() for path in found)])
        held = {path: array for path, array in held.items() if path not in self._initialized}
        self._taken = {
            path: _as_stored(leaf, held.get(path)) for path, leaf in wanted.items() if path not in self._initialized
        }
        if problems := differences(self._taken, held):
            has_more = _has_adapters(held) and not _has_adapters(self._taken)
            advice = " (it has low-rank adapters: keep its model.lora)" if has_more else ""
            raise mismatch(
                f"checkpoint.start_from: the parameters of {display_path(self._stored.folder)} are not those of this "
                "run's model",
                problems,
                f"Set model to what wrote it{advice}, or list the parameters to initialize, or not to take over, in "
                "checkpoint.start_fresh.",
            )

    def __str__(self) -> str:
        paths = [path for path, _ in leaves_with_paths(self._wanted)]
        initialized = [path for path in paths if path in self._initialized]
        rest = f"; initialized: {some(initialized)}" if initialized else ""
        taken = counted(len(paths) - len(initialized), "array")
        return f"Starting from the parameters of {display_path(self._stored.folder)} ({taken}){rest}."

    @property
    def initializes(self) -> bool:
        """True if some parameters are drawn by the init of the model."""
        return bool(self._initialized)

    def params(self) -> Params:
        """Reads the parameters, for `step.init(seed, params)`; all processes call this together.

        Raises:
            DamagedCheckpoint: An array has other bits than were saved.
            CheckpointUnavailable: The machine or the file system cannot read it.
        """
        self._reads += 1
        arrays, damage = restore_together(
            lambda: self._stored.restore({GROUP + path: leaf for path, leaf in self._taken.items()}),
            self._stored.compare,
            f"the parameters to start from/{self._reads}",
            self._seconds,
        )
        if damage:
            raise DamagedCheckpoint(_with_advice(damage))
        initialized = self._initialize()

        def choose(path: str, leaf: Any) -> Any:
            if path in initialized:
                return initialized[path]
            return arrays[GROUP + path] if leaf.size else np.zeros(leaf.shape, leaf.dtype)

        return map_with_path(choose, self._wanted)

    def _initialize(self) -> dict[str, jax.Array]:
        """Initializes what is not taken over, as a run from scratch does; XLA drops the rest of the computation."""
        wanted = self._initialized

        def init(key: jax.Array) -> dict[str, jax.Array]:
            return {path: leaf for path, leaf in leaves_with_paths(self._model.init(key)) if path in wanted}

        return jax.jit(init)(make_key(self._seed)) if wanted else {}


def _as_stored(leaf: jax.ShapeDtypeStruct, array: Any) -> jax.ShapeDtypeStruct:
    """Returns a parameter with the dtype of its stored array, if both are floating-point numbers."""
    if array is None or not all(jnp.issubdtype(each.dtype, jnp.floating) for each in (leaf, array)):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, array.dtype, sharding=leaf.sharding)


def _with_advice(damage: object) -> str:
    return f"checkpoint.start_from: {damage} Give another of its steps, as <run>/<step>."


def _has_adapters(paths: Iterable[str]) -> bool:
    return any(ADAPTERS in path.split("/") for path in paths)
