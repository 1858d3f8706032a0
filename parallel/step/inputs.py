"""Checks of the inputs of a step: batches and states.

A successful step does not pay for these checks: batches are checked while a program is traced, once for each shape, and
states only after a call has failed.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax import dtypes
from jax.core import Tracer

from ...layouts.paths import leaves_with_paths
from ...layouts.sizes import counted
from ...mesh.errors import UserError
from ..model.batch_names import explain_key_error
from ..xla.error_texts import NESTED, matches
from .state import TrainState

BatchShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of every array of a batch."""


def shapes_of(batch: Mapping[str, Any]) -> BatchShapes:
    """Returns the shapes of a batch, as the key of its compiled program."""
    return tuple((name, tuple(array.shape)) for name, array in sorted(batch.items()))


def warn_of_recompilation(before: BatchShapes, now: BatchShapes) -> None:
    """Warns that the step is compiled again for a batch of other shapes."""
    old = dict(before)
    changes = [f"{name} {old.get(name)} -> {shape}" for name, shape in now if shape != old.get(name)]
    warnings.warn(
        "The training step was compiled again, which costs as much as the first time: the batch changed, "
        f"{', '.join(changes)}. Keep shapes fixed.",
        RuntimeWarning,
        stacklevel=3,
    )


class BatchCheck:
    """The requirements on the batches of one program, and the arrays of the first one."""

    def __init__(self, name: str, check_rows: Callable[[int], None]) -> None:
        """Starts without a first batch.

        Args:
            name: The name of the program in messages.
            check_rows: Raises UserError if a number of rows cannot be split.
        """
        self._name = name
        self._check_rows = check_rows
        self._first: dict[str, str] = {}

    def around(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function of (state or parameters, batch, ...) to check its batches while it is traced."""

        def checked(first: Any, batch: Any, *rest: Any) -> Any:
            self.check(batch)
            result = program(first, batch, *rest)
            self._first = self._first or _signature(batch)
            return result

        return checked

    def check(self, batch: Any) -> None:
        """Checks names, dtypes, ranks and numbers of rows.

        Raises:
            UserError: One of them is invalid, or differs from the first batch.
        """
        if problem := _batch_problem(batch) or self._difference(_signature(batch)):
            raise UserError(problem)
        self._check_rows(next(iter(batch.values())).shape[0])

    def _difference(self, now: dict[str, str]) -> str:
        """Describes the differences from the first batch, except in sizes; "" if there are none."""
        if not self._first or now == self._first:
            return ""
        differences = [
            f"{name} is {now.get(name, 'missing')}, expected {self._first.get(name, 'no such array')}"
            for name in {**self._first, **now}
            if now.get(name) != self._first.get(name)
        ]
        return (
            f"The batch differs from the one that {self._name} was compiled for: {'; '.join(differences)}. Give every "
            "batch the same arrays, or build another step for these batches."
        )


def _batch_problem(batch: Any) -> str:
    """Returns the error message for a batch that is not a dict of arrays with rows on dim 0, or ""."""
    if not isinstance(batch, Mapping) or not batch:
        return (
            "The batch must be a dict of arrays with rows on dim 0, such as "
            f'{{"inputs": x, "targets": y, "weights": w}}, got {"an empty one" if batch == {} else _type(batch)}.'
        )
    for name, array in batch.items():
        if not getattr(array, "shape", ()) or not hasattr(array, "dtype"):
            return (
                f"batch[{name!r}] must be an array with rows on dim 0, got a value of type {_type(array)}. Give "
                f"np.asarray(batch[{name!r}]), or np.full(rows, value) if all rows have the same value."
            )
    rows = {name: array.shape[0] for name, array in batch.items()}
    if len(set(rows.values())) > 1:
        given = ", ".join(f"{name} {count}" for name, count in rows.items())
        return (
            f"The arrays of the batch differ in their numbers of rows: {given}. Dim 0 of each counts the rows of the "
            "global batch; give all of them the same number."
        )
    return ""


def _signature(batch: Mapping[str, Any]) -> dict[str, str]:
    """Returns the dtype and the number of dims of each array."""
    return {
        name: f"{dtypes.canonicalize_dtype(array.dtype)} with {counted(len(array.shape), 'dim')}"
        for name, array in batch.items()
    }


CONSUMED = (
    "The state was consumed by an earlier step, which reuses its memory for the next state. Continue from the state "
    "that it returned: state, metrics = step(state, batch). To keep a state, copy it first: "
    "jax.tree.map(jnp.copy, state)."
)
NESTED_SHARD_MAP = (
    "The model calls jax.shard_map inside the step, which is itself a shard_map over the axes of the batch. JAX cannot "
    "differentiate nested shard_maps. Give all devices to the axis that the model splits by itself (strategy: "
    "{tensor: 8} alone), or remove the model's shard_map and let XLA split the work by layouts.rules."
)


@contextmanager
def explain_errors(
    given: Any, expecting: Callable[[], Any], batch: Any, batches: BatchCheck, *, watched: Any = None
) -> Iterator[None]:
    """Rejects arrays that an earlier step has consumed (devices would deadlock), and explains errors of a call.

    Args:
        given: The state or the parameters of the call.
        expecting: Returns their shapes, dtypes and shardings, as `Step.abstract_state` does.
        batch: The batch of the call.
        batches: The requirements on batches.
        watched: The arrays to check before the call, which takes 0.1 us each; None = all that are given.

    Raises:
        UserError: An argument is invalid. Other errors are raised unchanged, with a note if the model reads an array
            that the batch does not contain.
    """
    for leaf in jax.tree.leaves(given if watched is None else watched):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise UserError(CONSUMED)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if problem := _tree_problem(given, expecting()):
            raise UserError(problem) from error
        batches.check(batch)
        if matches(error, NESTED):
            raise UserError(NESTED_SHARD_MAP) from error
        if isinstance(error, KeyError) and (note := explain_key_error(error, batch)):
            error.add_note(note)  # the key may belong to another mapping, so the error itself is kept
        raise


def _tree_problem(given: Any, expected: Any) -> str:
    """Describes the first difference of a state or parameters from the expected ones; "" if there is none."""
    whole = isinstance(expected, TrainState)
    if whole and not isinstance(given, TrainState):
        return (
            f"The state must be a TrainState, got a value of type {_type(given)}. Start from step.init(seed) or a "
            "checkpoint, and continue with state, metrics = step(state, batch)."
        )
    if isinstance(given, TrainState) and not whole:
        return "Expected parameters, got a whole state. Pass state.params."
    name, tree = ("state", "step.abstract_state()") if whole else ("parameters", "step.abstract_state().params")
    if isinstance(given, TrainState) and given.order != expected.order:
        return (
            "The state given does not fit this step: its blocks are stored in the order of another pipeline or of the "
            "model, or errors of compression belong to other layouts. Save it and restore it with spmdkit.Checkpoints, "
            "which converts between pipelines, or start from a new state."
        )
    found, wanted = dict(leaves_with_paths(given)), dict(leaves_with_paths(expected))
    for path in dict.fromkeys((*wanted, *found)):
        have, need = found.get(path), wanted.get(path)
        if not _fits(have, need):
            return (
                f"The {name} given does not fit this step: {path!r} is {_describe(have)}, expected {_describe(need)}. "
                "Build the step with the same model, optimizer and strategy, or start from a new state. To move arrays "
                f"from another mesh: jax.device_put({name}, jax.tree.map(lambda leaf: leaf.sharding, {tree}))."
            )
    return ""


def _fits(leaf: Any, wanted: Any) -> bool:
    """Returns whether an array has the expected dtype, shape and sharding; a missing array is None."""
    if not hasattr(leaf, "dtype") or wanted is None or (leaf.dtype, leaf.shape) != (wanted.dtype, wanted.shape):
        return False
    is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return not is_placed or leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def _describe(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return "missing" if leaf is None else f"of type {_type(leaf)}"
    text, sharding = f"{leaf.dtype}{list(leaf.shape)}", getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return text
    sizes = ", ".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items() if size > 1)
    return f"{text} on {counted(len(sharding.device_set), 'device')} ({sizes}) as {sharding.spec}"


def _type(value: Any) -> str:
    return type(value).__name__
