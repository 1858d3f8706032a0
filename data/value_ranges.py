"""The valid values of data: labels within the classes, token ids within the vocabulary, finite numbers.

Otherwise training continues with wrong results: an invalid label counts as a class that every prediction misses, a
token outside the table reads NaN, a negative weight reverses learning. So every batch is checked where it is read,
beside the training step, with one minimum and one maximum of each array. Arrays in memory are checked when they are
opened.

A target with weight 0 does not count, so it may have any value (-1 and -100 are common); an input must always be valid.
If there are several of a kind, such as "targets/box", numbers must be finite too. Arrays with other names are the
user's own: they must only fit JAX's types.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh.errors import UserError
from .examples import SEPARATOR
from .source import BadDataError, Source, Splits, memory_map_of, origin_of, reader_name, take

SCANNED_BYTES = 1 << 30
"""Arrays in memory up to this size are checked when data is opened; larger ones batch by batch."""


class Limit(NamedTuple):
    """The number of ids or classes, and the config key that sets it."""

    key: str
    number: int


class Limits(NamedTuple):
    """The values that a model accepts; None if unknown.

    Attributes:
        inputs: The ids that integer inputs may have.
        targets: The ids or classes that targets may have.
        finite: Inputs and targets that are floats must be finite.
    """

    inputs: Limit | None = None
    targets: Limit | None = None
    finite: bool = True

    def of(self, name: str) -> Limit | None:
        """Returns the limit of the array with a name."""
        return {"inputs": self.inputs, "targets": self.targets}.get(name)


NO_LIMITS = Limits()


def check_rows(arrays: Mapping[str, np.ndarray], limits: Limits, describe: Callable[[int], str]) -> None:
    """Checks the values of examples.

    Args:
        arrays: Name -> rows of examples, (N, ...).
        limits: The values that the model accepts.
        describe: The function from a row to its name in messages.

    Raises:
        BadDataError: A value is invalid; the message names the first one.
    """
    for name, array in arrays.items():
        allowed = _allowed(name, array.dtype, limits)
        if allowed is None or not array.size:
            continue
        with np.errstate(invalid="ignore"):  # comparisons with NaN are false
            if allowed[0] <= array.min() and array.max() <= allowed[1]:
                continue
            wrong = ~((array >= allowed[0]) & (array <= allowed[1]))
        if _kind(name) == "targets":
            wrong &= _counted(arrays.get("weights"), array.shape)
        if wrong.any():
            place = tuple(int(index) for index in np.argwhere(wrong)[0])
            raise BadDataError(_message(name, array[place], place, limits, describe(place[0])))


def check_splits(splits: Splits, limits: Limits) -> None:
    """Checks both splits of data with `check_source`, and that ids and classes are integers.

    Args:
        splits: Training and evaluation examples.
        limits: The values that the model accepts.

    Raises:
        BadDataError: A value or a dtype is invalid.
    """
    check_vocabulary(splits.vocabulary)
    for name, source in splits.by_name().items():
        _check_dtypes(source[0], limits)
        check_source(source, limits, name)


def check_vocabulary(number: int | None) -> None:
    """Raises a UserError if a number of token ids is less than 1."""
    if number is not None and number < 1:
        raise UserError(f"vocabulary={number} must be at least 1, the number of token ids, or None.")


def check_source(source: Source, limits: Limits, split: str) -> None:
    """Checks a split that is in memory; large or memory-mapped arrays are checked batch by batch instead.

    Args:
        source: Examples; a source with `arrays_in_memory` has them as rows of arrays.
        limits: The values that the model accepts.
        split: "training" or "evaluation", for messages.

    Raises:
        BadDataError: A value is invalid.
    """
    arrays = getattr(source, "arrays_in_memory", {})
    kept = {
        name: array for name, array in arrays.items() if array.nbytes <= SCANNED_BYTES and memory_map_of(array) is None
    }
    check_rows(kept, limits, lambda row: describe_example(source, split, row))


def describe_example(source: Source, split: str, index: int) -> str:
    """Returns the name of an example in messages, with its origin if the source knows it."""
    origin = origin_of(source, index)
    return f"example {index} of the {split} split" + (f" ({origin})" if origin else "")


def checked(
    source: Source, limits: Limits, split: str, *, varies: bool = False
) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Returns a function like `take` for one source that checks the examples.

    Args:
        source: Examples.
        limits: The values that the model accepts.
        split: "training" or "evaluation", for messages.
        varies: Whether the shapes of examples may differ between calls.

    Returns:
        A function from indices (int64, (N,)) to name -> array of N rows. It raises a BadDataError for invalid values,
        and a UserError for examples that have another form than those of the first call.
    """
    seen: list[dict[str, tuple[np.dtype, tuple[int, ...]]]] = []

    def check_form(arrays: Mapping[str, np.ndarray], index: int) -> None:
        form = {name: (np.asarray(rows).dtype, np.shape(rows)[1:]) for name, rows in arrays.items()}
        if form in seen:
            return
        seen.append(form)
        first = _on_devices(seen[0])
        now = _on_devices(form)
        if now != first:
            raise UserError(
                f"{reader_name(source)}: examples are {first} at first, and {now} from "
                f"{describe_example(source, split, index)} on; all must have the same names, dtypes and shapes. Pad "
                "them, with weights of 0."
            )

    def read(indices: np.ndarray) -> dict[str, np.ndarray]:
        arrays = take(source, indices)
        if not varies:
            check_form(arrays, int(indices[0]))
        check_rows(arrays, limits, lambda row: describe_example(source, split, int(indices[row])))
        return arrays

    return read


def _on_devices(form: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtypes and shapes of rows as they are on devices, by name."""
    return {name: (str(jax.dtypes.canonicalize_dtype(dtype)), shape) for name, (dtype, shape) in sorted(form.items())}


def _check_dtypes(example: Mapping[str, Any], limits: Limits) -> None:
    """Raises a BadDataError if ids or classes are not integers."""
    for name, value in example.items():
        limit, dtype = limits.of(name), np.asarray(value).dtype
        if limit is not None and dtype.kind not in "iu":
            rule = f"{limit.key}={limit.number} requires integers, 0 .. {limit.number - 1}"
            raise BadDataError(f"{name} are {dtype}; {rule}. Give {name}.astype(numpy.int32).")


def _allowed(name: str, dtype: np.dtype, limits: Limits) -> tuple[Any, Any] | None:
    """Returns the minimum and maximum value of an array; None if any value of its dtype is valid."""
    limit = limits.of(name)
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
    """Returns the first part of a nested name: "targets" for "targets/box"."""
    return name.partition(SEPARATOR)[0]


def _counted(weights: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """Returns which targets have a weight: bool, broadcast to their shape."""
    if weights is None or weights.shape != shape[: weights.ndim]:
        return np.ones(shape, bool)
    return np.broadcast_to((weights != 0).reshape(weights.shape + (1,) * (len(shape) - weights.ndim)), shape)


def _message(name: str, value: Any, place: tuple[int, ...], limits: Limits, example: str) -> str:
    given = f"{name} of {example}{f' at {list(place[1:])}' if place[1:] else ''} is {value}"
    limit = limits.of(name)
    if _kind(name) == "weights":
        return f"{given}: a weight must be finite and at least 0. Give 0 to values that do not count."
    if limit is not None:
        padding = " If it is padding, give it weight 0." if name == "targets" else ""
        return (
            f"{given}; {limit.key}={limit.number} allows 0 .. {limit.number - 1}. Raise it, or fix the data.{padding}"
        )
    if np.issubdtype(np.asarray(value).dtype, np.integer):
        return f"{given}, which does not fit int32; 64-bit numbers require precision.params=float64. Fix the data."
    used = jax.dtypes.canonicalize_dtype(np.asarray(value).dtype)
    return f"{given}: not a finite number of {used}. Fix the data, or leave the example out."
