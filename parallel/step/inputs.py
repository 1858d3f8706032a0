"""The inputs of a step: checks of batches and states.

Nothing here costs a step that goes well: batches are looked at while a program is traced, which happens once for each
shape, and states when a call was refused.
"""

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

Signature = dict[str, tuple[str, int]]
"""Name of an array of a batch -> its dtype and number of dims."""


BatchShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of every array of a batch."""


def shapes_of(batch: Mapping[str, Any]) -> BatchShapes:
    """Returns the shapes of a batch, as the key of its compiled program."""
    return tuple((name, tuple(array.shape)) for name, array in sorted(batch.items()))


class BatchCheck:
    """The requirements on the batches of one program, and the signature of the first one."""

    def __init__(self, name: str, check_rows: Callable[[int], None]) -> None:
        """Starts before the first batch.

        Args:
            name: What the program is called in messages.
            check_rows: Raises UserError where a number of rows cannot be split.
        """
        self._name = name
        self._check_rows = check_rows
        self._first: Signature | None = None

    def around(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function of (state or parameters, batch, ...) with checks of its batches while it is traced."""

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
        problem = _problem(batch) or (self._first and _changed(self._name, self._first, _signature(batch)))
        if problem:
            raise UserError(problem)
        self._check_rows(next(iter(batch.values())).shape[0])


def _problem(batch: Any) -> str | None:
    """Returns the problem with a batch that is not a dict of arrays with rows on dim 0, or None."""
    if not isinstance(batch, Mapping):
        return (
            f"The batch is a {_type(batch)}. A batch is a dict of arrays with rows on dim 0, such as "
            '{"inputs": x, "targets": y, "weights": w, "example": i}.'
        )
    if not batch:
        return "The batch is empty. A batch is a dict of arrays with rows on dim 0, such as inputs and targets."
    for name, array in batch.items():
        if isinstance(array, bool | int | float | complex) or getattr(array, "shape", None) == ():
            return (
                f"batch[{name!r}] is a scalar, but every array of a batch has rows on dim 0. Give it once for each "
                "row, np.full(rows, value), or make it a constant of the model."
            )
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            return (
                f"batch[{name!r}] is a {_type(array)}, but a batch holds arrays with rows on dim 0. Give "
                f"np.asarray(batch[{name!r}])" + (", one for each of its entries." if isinstance(array, dict) else ".")
            )
    rows = {name: array.shape[0] for name, array in batch.items()}
    if len(set(rows.values())) > 1:
        given = ", ".join(f"{name} {count}" for name, count in rows.items())
        return (
            f"The arrays of the batch differ in their numbers of rows: {given}. Dim 0 of each counts the rows of the "
            "global batch; give all of them the same number."
        )
    return None


def _signature(batch: Mapping[str, Any]) -> Signature:
    return {name: (str(dtypes.canonicalize_dtype(array.dtype)), len(array.shape)) for name, array in batch.items()}


def _changed(name: str, first: Signature, now: Signature) -> str | None:
    """Returns the difference between a batch and the first one, other than in sizes, or None."""
    missing, new = [sorted(set(a) - set(b)) for a, b in ((first, now), (now, first))]
    if missing or new:
        what = [f"{', '.join(names)} {verb}" for names, verb in ((missing, "is missing"), (new, "is new")) if names]
        return (
            f"The batch has the arrays {', '.join(now)}, but {name} was compiled for {', '.join(first)}: "
            f"{' and '.join(what)}. Give every batch the same arrays, or build another step for these."
        )
    for each, (dtype, rank) in now.items():
        if (dtype, rank) != first[each]:
            wanted = first[each]
            remedy = f"batch[{each!r}].astype({wanted[0]!r})" if rank == wanted[1] else "an array of as many dims"
            return (
                f"batch[{each!r}] is {dtype} with {counted(rank, 'dim')}, but {name} was compiled for {wanted[0]} with "
                f"{wanted[1]}. Give {remedy}, or build another step for such batches."
            )
    return None


def refuse_consumed(array: Any) -> None:
    """Rejects an array of a state that an earlier step has consumed: devices would deadlock.

    Args:
        array: One of the state; takes 0.1 us.

    Raises:
        UserError: It was donated.
    """
    if isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted():
        raise UserError(
            "The state given was consumed by an earlier step, which writes the next state in its place. Go on from "
            "the state that it returned, state, metrics = step(state, batch); to keep one, copy it before: "
            "jax.tree.map(jnp.copy, state)."
        )


@contextmanager
def explained(given: Any, expecting: Callable[[], Any], batch: Any, batches: BatchCheck) -> Iterator[None]:
    """Refuses consumed arrays, and explains what is raised inside; the arguments are those of `explain`."""
    for leaf in jax.tree.leaves(given):
        refuse_consumed(leaf)
    try:
        yield
    except Exception as error:
        explain(error, given, expecting, batch, batches)
        raise


def explain(error: Exception, given: Any, expecting: Callable[[], Any], batch: Any, batches: BatchCheck) -> None:
    """Says what was wrong with the arguments of a call that failed; returns where nothing was, with a note on the error
    where the model reads an array that the batch does not hold.

    Args:
        error: What the call raised.
        given: The state or the parameters that it was given.
        expecting: Gives their shapes, dtypes and shardings, as `Step.abstract_state` does.
        batch: The batch that it was given.
        batches: The requirements on batches.

    Raises:
        UserError: In place of the error.
    """
    if isinstance(error, UserError):
        return
    expected = expecting()
    problem = _state_problem(given, expected) if isinstance(expected, TrainState) else None
    problem = problem or _tree_problem(given, expected)
    if problem:
        raise UserError(problem) from error
    batches.check(batch)
    problem = _placement_problem(batch, expected) or _nested_problem(error)
    if problem:
        raise UserError(problem) from error
    if isinstance(error, KeyError) and (said := explain_key_error(error, batch)):
        error.add_note(said)  # it may be of another mapping of the model's: the error stays


def _state_problem(given: Any, expected: TrainState) -> str | None:
    if isinstance(given, TrainState):
        return None
    if isinstance(given, tuple) and given and isinstance(given[0], TrainState):
        return (
            f"The state given is a tuple of {len(given)}: a step returns (state, metrics). Take them apart, "
            "state, metrics = step(state, batch)."
        )
    same = jax.tree.structure(given) == jax.tree.structure(expected.params)
    what = "the parameters alone" if same else f"a {_type(given)}"
    return (
        f"The state given is {what}, not a TrainState. Start from step.init(seed), step.init(seed, params) or a "
        "checkpoint."
    )


FIELDS = {
    "params": ("another model", "the model that it was made for"),
    "opt_state": ("another optimizer", "the optimizer that it was made with"),
    "extra": ("another strategy (local steps and compression keep state)", "the strategy that it was made under"),
}
"""Field of a state -> what it is of where it does not fit, and with what to build the step for it."""


def _tree_problem(given: Any, expected: Any) -> str | None:
    """Returns the difference between a state or parameters and the expected ones, or None."""
    if isinstance(given, TrainState) and not isinstance(expected, TrainState):
        return "A whole state was given where the parameters belong. Give state.params."
    whole = isinstance(expected, TrainState)
    name = "state" if whole else "parameters"
    found, wanted = dict(leaves_with_paths(given)), dict(leaves_with_paths(expected))
    for path in dict.fromkeys((*wanted, *found)):
        of, remedy = FIELDS.get(path.split("/")[0] if whole else "params", ("another step", "what it was made with"))
        if path not in found or path not in wanted:
            what = "it lacks an array" if path not in found else "it also has an array"
            return f"The {name} given: {what} at {path!r}. It is of {of}. Build the step with {remedy}, or start anew."
        leaf, want = found[path], wanted[path]
        shape, dtype = getattr(leaf, "shape", ()), getattr(leaf, "dtype", _type(leaf))
        if tuple(shape) != tuple(want.shape) or dtype != want.dtype:
            return (
                f"The {name} given: {path!r} is {dtype}{list(shape)}, and this step works on "
                f"{want.dtype}{list(want.shape)}. It is of {of}. Build the step with {remedy}, or start anew."
            )
    if jax.tree.structure(given) != jax.tree.structure(expected):
        return f"The {name} given has other containers than this step's. Build the step with what it was made with."
    for path, leaf in found.items():
        if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
            continue
        if not leaf.sharding.is_equivalent_to(wanted[path].sharding, leaf.ndim):
            tree = "step.abstract_state()" + ("" if whole else ".params")
            return (
                f"The {name} given: {path!r} lies on {_place(leaf.sharding)}, but this step has it on "
                f"{_place(wanted[path].sharding)}. It is of another mesh or strategy. Move it: jax.device_put({name}, "
                f"jax.tree.map(lambda leaf: leaf.sharding, {tree})), or restore a checkpoint, which does so."
            )
    return None


def _placement_problem(batch: Mapping[str, Any], expected: Any) -> str | None:
    """Returns the problem with an array of a batch on other devices, or None."""
    devices = jax.tree.leaves(expected)[0].sharding.device_set
    for name, array in batch.items():
        if isinstance(array, jax.Array) and not isinstance(array, Tracer):
            if array.is_deleted():
                return f"batch[{name!r}] was deleted or donated before. Give the array again, or one of the host."
            if array.sharding.device_set != devices:
                return (
                    f"batch[{name!r}] lies on {_place(array.sharding)}, and the step runs on {len(devices)}. Give "
                    "arrays of the host, or place them: jax.device_put(batch, step.plan.batch_sharding())."
                )
    return None


def _nested_problem(error: Exception) -> str | None:
    if not matches(error, NESTED):
        return None
    return (
        "The model calls jax.shard_map inside a step that is one already, over the axes of the batch, and JAX cannot "
        "differentiate the one inside the other. Give all devices to the axis that the model splits by itself "
        "(strategy: {tensor: 8} alone), or drop its shard_map and let XLA split the work by layouts.rules."
    )


def _place(sharding: Any) -> str:
    devices = len(sharding.device_set)
    where = counted(devices, "device")
    if isinstance(sharding, jax.sharding.NamedSharding):
        sizes = ", ".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items() if size > 1)
        where += f" (mesh {sizes or 'of one device'}) as {sharding.spec}"
    return where


def _type(value: Any) -> str:
    return type(value).__name__
