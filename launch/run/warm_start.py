"""`checkpoint.start_from`: a new run begins with the parameters of another, and nothing else of its state.

    taken over      every parameter of the same path and shape; its dtype becomes that of this run
    drawn anew      what `checkpoint.start_fresh` names, and low-rank adapters where the other run had none
    error           all else: parameters that are missing there, are not here, or have another shape

Arrays stay on disk until a device is sent its part: no process holds a whole one. Before that, each array is compared
with its checksum, by one of the processes.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...layouts.path_patterns import paths_met, some
from ...layouts.paths import leaves_with_paths, map_with_path
from ...layouts.sizes import counted
from ...mesh.coordination import differences, exchange
from ...mesh.keys import make_key
from ...models.layers.low_rank import NAME as ADAPTERS
from ...parallel.model import Params
from ...parallel.sharding.stored_order import stored_order
from ...training.checkpointing.errors import MAX_LISTED, CheckpointError, DamagedCheckpoint
from ..inspection.finding import find, shown
from ..inspection.stored import StoredArray, StoredCheckpoint
from .build import Built
from .directory.shared import wait_until_all_know
from .guarding.agreement import Disagreement

GROUP = "params/"


class WarmStart:
    """The parameters that a new run begins with, from a checkpoint of another run."""

    def __init__(self, built: Built) -> None:
        """Compares what the checkpoint holds with the model, from its description: reads no array.

        Args:
            built: The run; its config names the other.

        Raises:
            CheckpointError: There is no such checkpoint, or parameters do not fit; all are named.
            UserError: An expression of `checkpoint.start_fresh` matches no parameter.
            Disagreement: The processes of this run see different checkpoints there.
            ProcessesMissing: Some did not say which.
            CheckpointUnavailable: The machine or the file system does not let it be read.
        """
        self._built, self._config = built, built.config.checkpoint
        folder = find(self._config.start_from).one
        try:
            self._stored = StoredCheckpoint(folder)
            self._held = _parameters(self._stored)
            agree_on(self._stored, built.config.timeouts.rendezvous)
        except DamagedCheckpoint as error:
            raise _told(error) from error
        order = stored_order(built.layouts)
        self._wanted = order.abstract_model(built.step.abstract_state().params)
        wanted = {path: leaf for path, leaf in leaves_with_paths(self._wanted) if leaf.size}
        self._drawn = self._left_out(list(wanted))
        self._is_compared = False
        self._check({path: leaf for path, leaf in wanted.items() if path not in self._drawn})

    def __str__(self) -> str:
        paths = [path for path, _ in leaves_with_paths(self._wanted)]
        drawn = [path for path in paths if path in self._drawn]
        told = f"; drawn anew: {some(drawn)}" if drawn else ""
        taken = counted(len(paths) - len(drawn), "array")
        return f"Starting from the parameters of {shown(self._stored.folder)} ({taken}){told}."

    def params(self) -> Params:
        """The parameters, for `step.init(seed, params)`: arrays that are read part by part. All processes call this.

        Raises:
            DamagedCheckpoint: An array has other bits than were saved.
            CheckpointUnavailable: The machine or the file system does not let it be read.
        """
        if not self._is_compared:
            self._compare([path for path in self._held if path not in self._drawn])
        self._is_compared = True
        drawn = self._draw()

        def one(path: str, leaf: Any) -> Any:
            if path in drawn:
                return drawn[path]
            return StoredParameter(self._stored, GROUP + path) if leaf.size else np.zeros(leaf.shape, leaf.dtype)

        return map_with_path(one, self._wanted)

    def _left_out(self, wanted: Sequence[str]) -> frozenset[str]:
        """Paths that are not taken over, of this run or of the other."""
        paths = list(dict.fromkeys([*wanted, *self._held]))
        met = paths_met(self._config.start_fresh, paths, "checkpoint.start_fresh")
        new = [] if _has_adapters(self._held) else [path for path in wanted if _has_adapters([path])]
        return frozenset([*new, *(path for found in met.values() for path in found)])

    def _check(self, wanted: Mapping[str, Any]) -> None:
        held = {path: array for path, array in self._held.items() if path not in self._drawn}
        problems = [f"{path}: {_text(leaf)} here, not there" for path, leaf in wanted.items() if path not in held]
        problems += [f"{path}: {_text(array)} there, not here" for path, array in held.items() if path not in wanted]
        problems += [
            f"{path}: {_text(held[path])} there, {_text(leaf)} here"
            for path, leaf in wanted.items()
            if path in held and not _is_alike(held[path], leaf)
        ]
        if problems:
            more = [f"... and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
            raise CheckpointError(
                f"checkpoint.start_from: the parameters of {shown(self._stored.folder)} are not those of this run's "
                f"model, in {counted(len(problems), 'array')}:\n  "
                + "\n  ".join(problems[:MAX_LISTED] + more)
                + f"\nSet model to what wrote it{self._advice()}, or name what is to be drawn anew, or not to be taken "
                "over, in checkpoint.start_fresh."
            )

    def _advice(self) -> str:
        here = [path for path, _ in leaves_with_paths(self._wanted)]
        more = _has_adapters(self._held) and not _has_adapters(here)
        return " (it has low-rank adapters: keep its model.lora)" if more else ""

    def _compare(self, paths: Sequence[str]) -> None:
        """Reads every array once, in one of the processes, and compares it with its checksum."""
        damage = ""
        try:
            for path in paths[jax.process_index() :: jax.process_count()]:
                self._compare_one(GROUP + path)
        except DamagedCheckpoint as error:
            damage = str(_told(error))
        seconds = self._built.config.timeouts.rendezvous
        told = exchange("the parameters to start from", damage, seconds=seconds)
        found = next(filter(None, told), "")
        if found:
            raise DamagedCheckpoint(found)

    def _compare_one(self, name: str) -> None:
        if self._stored.missing_chunks(name):
            raise DamagedCheckpoint(f"The checkpoint {self._stored.folder} is damaged: pieces of {name} are missing.")
        for _ in self._stored.parts(name):
            pass

    def _draw(self) -> dict[str, jax.Array]:
        """What is drawn anew, as a run that draws everything draws it; the rest is not computed."""
        wanted = self._drawn

        def chosen(key: jax.Array) -> dict[str, jax.Array]:
            return {path: leaf for path, leaf in leaves_with_paths(self._built.model.init(key)) if path in wanted}

        return jax.jit(chosen)(make_key(self._built.config.run.seed)) if wanted else {}


def agree_on(stored: StoredCheckpoint, seconds: float) -> None:
    """Makes sure that all processes begin with the same parameters. Every process of the run calls this.

    The newest checkpoint of a run that still trains, or of a file system that one host sees late, may be another one in
    each process.

    Args:
        stored: What this process has found.
        seconds: How long to wait for the others.

    Raises:
        Disagreement: They have found different ones; the ranks are named.
        ProcessesMissing: Some did not answer in time.
    """
    sums = sorted((stored.checksums or {}).items())
    mine = f"{stored.folder.name} (checksums {hashlib.sha256(repr(sums).encode()).hexdigest()[:12]})"
    found = exchange("the checkpoint to start from", mine, seconds=seconds)
    if len(set(found)) > 1:
        wait_until_all_know()
        raise Disagreement(
            f"checkpoint.start_from: {differences('the step of the checkpoint', found)}. All processes have to begin "
            "with the same parameters. Name one of its steps, as <run>/<step>, by an absolute path on a file system "
            "that all hosts mount; nothing was trained."
        )


class StoredParameter:
    """A parameter of a checkpoint as an array that is read where it is indexed.

    Attributes:
        shape: global.
        dtype: as it is stored.
    """

    def __init__(self, stored: StoredCheckpoint, name: str) -> None:
        array = stored.array(name)
        self._stored, self._name = stored, name
        self.shape, self.dtype = array.shape, array.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        """A part: slices of each dim, where dim 0 may have an array of whole numbers instead."""
        index = index if isinstance(index, tuple) else (index,)
        if index and isinstance(index[0], np.ndarray):
            rows = [self[(slice(int(row), int(row) + 1), *index[1:])] for row in index[0]]
            return (
                np.concatenate(rows) if rows else np.empty((0, *self[(slice(0, 1), *index[1:])].shape[1:]), self.dtype)
            )
        bounds = [each.indices(size) for each, size in zip(index, self.shape, strict=False)]
        whole = [(0, size, 1) for size in self.shape[len(bounds) :]]
        return self._stored.part(self._name, tuple(slice(*each) for each in [*bounds, *whole]))


def _parameters(stored: StoredCheckpoint) -> dict[str, StoredArray]:
    """Path -> shape and dtype."""
    names = [name for name in stored.names if name.startswith(GROUP)]
    return {name.removeprefix(GROUP): stored.array(name) for name in names}


def _told(error: DamagedCheckpoint) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"checkpoint.start_from: {error} Give another of its steps, as <run>/<step>.")


def _has_adapters(paths: Iterable[str]) -> bool:
    return any(ADAPTERS in path.split("/") for path in paths)


def _is_alike(one: Any, other: Any) -> bool:
    return tuple(one.shape) == tuple(other.shape) and _is_float(one) == _is_float(other)


def _is_float(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def _text(array: Any) -> str:
    return f"{jnp.dtype(array.dtype)}{list(array.shape)}"
