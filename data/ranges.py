"""Which values data may hold: labels within the classes, token ids within the vocabulary, numbers that are finite.

Outside them training goes on, and wrong: a label that is no class counts as one that every class is wrong for, a token
that is not in the table reads NaN, a weight below zero turns learning round. So every batch is looked at where it is
read, beside the training step: one minimum and one maximum of each array. Arrays in memory are looked at when they are
opened.

A target whose weight is 0 does not count, so it may be anything (-1 and -100 are common); an input has to be right
everywhere. Where there are several of a kind, as in "targets/box", numbers have to be finite as well. Arrays of other
names are the user's own: they only have to fit the types of JAX.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh.errors import UserError
from .names import SEPARATOR
from .source import BadDataError, Source, Splits, take

SCANNED_BYTES = 1 << 30
"""Arrays in memory up to this size are looked at whole when data is opened; larger ones batch by batch."""
BLOCK_BYTES = 1 << 24


class Limit(NamedTuple):
    """How many ids or classes there are, and the config key that says so."""

    key: str
    number: int


class Limits(NamedTuple):
    """What a model takes; None where nobody knows.

    Attributes:
        inputs: ids that integer inputs may be.
        targets: ids or classes that targets may be.
        finite: whether inputs and targets that are floats have to be finite.
    """

    inputs: Limit | None = None
    targets: Limit | None = None
    finite: bool = True


NO_LIMITS = Limits()


def check_rows(arrays: Mapping[str, np.ndarray], limits: Limits, describe: Callable[[int], str]) -> None:
    """Checks the values of examples.

    Args:
        arrays: Name -> rows of examples, (N, ...).
        limits: What the model takes.
        describe: Says which example a row is, for the message.

    Raises:
        BadDataError: A value is not allowed; the first one is named.
    """
    for name, array in arrays.items():
        allowed = _allowed(name, array.dtype, limits)
        if allowed is None or not array.size:
            continue
        with np.errstate(invalid="ignore"):  # NaN is between nothing
            if allowed[0] <= array.min() and array.max() <= allowed[1]:
                continue
            wrong = ~((array >= allowed[0]) & (array <= allowed[1]))
        if _kind(name) == "targets":
            wrong &= _counted(arrays.get("weights"), array.shape)
        if wrong.any():
            place = tuple(int(index) for index in np.argwhere(wrong)[0])
            raise BadDataError(_message(name, array[place], place, limits, describe(place[0])))


def check_splits(splits: Splits, limits: Limits) -> None:
    """Checks both splits of data as `check_source` does, and that ids and classes are whole numbers.

    Args:
        splits: Training and evaluation examples.
        limits: What the model takes.

    Raises:
        BadDataError: A value or a type is not allowed.
    """
    check_vocabulary(splits.vocabulary)
    for name, source in (("training", splits.train), ("evaluation", splits.evaluation)):
        if source is not None:
            _check_dtypes(source[0], limits)
            check_source(source, limits, name)


def check_vocabulary(number: int | None) -> None:
    """Raises a UserError if a number of token ids is less than 1."""
    if number is not None and number < 1:
        raise UserError(f"vocabulary={number} must be at least 1, the number of token ids, or None.")


def check_source(source: Source, limits: Limits, split: str) -> None:
    """Checks all of a split that is in memory; what is large or memory-mapped is left to the batches.

    Args:
        source: Examples; one with `arrays_in_memory` holds them as rows of arrays.
        limits: What the model takes.
        split: "training" or "evaluation", for the message.

    Raises:
        BadDataError: A value is not allowed.
    """
    arrays = getattr(source, "arrays_in_memory", {})
    kept = {name: array for name, array in arrays.items() if array.nbytes <= SCANNED_BYTES and not _is_mapped(array)}
    row_bytes = sum(array.nbytes for array in kept.values()) // len(source)
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, len(source) if kept else 0, step):
        block = {name: array[start : start + step] for name, array in kept.items()}
        check_rows(block, limits, lambda row, start=start: describe_example(source, split, start + row))


def describe_example(source: Source, split: str, index: int) -> str:
    """Which example it is, and where it comes from as far as the source can tell."""
    origin = getattr(source, "origin", None)
    where = f" ({origin(index)})" if origin is not None and origin(index) else ""
    return f"example {index} of the {split} split{where}"


def checked(source: Source, limits: Limits, split: str) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """A function like `take` of one source whose examples are checked."""

    def read(indices: np.ndarray) -> dict[str, np.ndarray]:
        arrays = take(source, indices)
        check_rows(arrays, limits, lambda row: describe_example(source, split, int(indices[row])))
        return arrays

    return read


def _check_dtypes(example: Mapping[str, Any], limits: Limits) -> None:
    """Raises where ids or classes are no integers."""
    for name, limit in (("inputs", limits.inputs), ("targets", limits.targets)):
        value = example.get(name)
        if limit is not None and value is not None and np.asarray(value).dtype.kind not in "iu":
            raise BadDataError(
                f"{name} are {np.asarray(value).dtype}; {limit.key}={limit.number} needs whole numbers, 0 .. "
                f"{limit.number - 1}. Give {name}.astype(numpy.int32)."
            )


def _allowed(name: str, dtype: np.dtype, limits: Limits) -> tuple[Any, Any] | None:
    """The least and the largest value that an array may hold; None where any value of its type will do."""
    limit = {"inputs": limits.inputs, "targets": limits.targets}.get(name)
    if dtype.kind in "iu" and limit is not None:
        return 0, limit.number - 1
    kind = _kind(name)
    known = kind in ("inputs", "targets", "weights")
    used = jax.dtypes.canonicalize_dtype(dtype) if dtype.kind in "iuf" else dtype
    if jnp.issubdtype(used, jnp.floating) and known and (limits.finite or kind == "weights"):
        most = float(jnp.finfo(used).max)
        return (0.0 if kind == "weights" else -most), most
    if dtype.kind in "iu" and (used != dtype or kind == "weights"):
        return (0 if kind == "weights" else int(np.iinfo(used).min)), int(np.iinfo(used).max)
    return None


def _kind(name: str) -> str:
    """What a nested name is one of: "targets" for "targets/box"."""
    return name.partition(SEPARATOR)[0]


def _counted(weights: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """Which targets count: bool, broadcast to their shape."""
    if weights is None or weights.shape != shape[: weights.ndim]:
        return np.ones(shape, bool)
    return np.broadcast_to((weights != 0).reshape(weights.shape + (1,) * (len(shape) - weights.ndim)), shape)


def _message(name: str, value: Any, place: tuple[int, ...], limits: Limits, example: str) -> str:
    """What is wrong with a value, and how to mend it."""
    at = f" at {list(place[1:])}" if place[1:] else ""
    given = f"{name} of {example}{at} is {value}"
    limit = {"inputs": limits.inputs, "targets": limits.targets}.get(name)
    if _kind(name) == "weights":
        return f"{given}: a weight is a finite number of at least 0; give 0 to what does not count."
    if limit is not None:
        unless = " Where it is padding, give it weight 0." if name == "targets" else ""
        allowed = f"{limit.key}={limit.number} allows 0 .. {limit.number - 1}"
        return f"{given}; {allowed}. Raise it, or mend the data.{unless}"
    if np.issubdtype(np.asarray(value).dtype, np.integer):
        return f"{given}, which does not fit int32; 64-bit numbers need precision.params=float64. Mend the data."
    used = jax.dtypes.canonicalize_dtype(np.asarray(value).dtype)
    return f"{given}: not a finite number of {used}. Mend the data, or leave the example out."


def _is_mapped(array: Any) -> bool:
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None
