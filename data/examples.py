"""Examples as flat dicts of NumPy arrays, from what users and other libraries give.

    {"image": a, "targets": {"label": b, "box": c}}      an example, as given
    {"image": a, "targets/label": b, "targets/box": c}   its form in a batch, which a loss reads

A batch is flat, so that every array in it has one name in messages, checks and layouts. `nested` restores the other
form for a loss; under `jit` it costs nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..layouts.paths import nest
from ..mesh.errors import UserError

nested = nest
SEPARATOR = "/"
PAIR = ("inputs", "targets")


def flat(example: Any, names: Sequence[str] = PAIR) -> dict[str, Any]:
    """Returns the arrays of an example by name.

    Args:
        example: A mapping, whose values may be mappings and lists; or a tuple or list.
        names: The names of the entries of a tuple; a third entry after inputs and targets is weights, as in tf.data
            and Keras.

    Returns:
        Name -> leaf; "/" joins the names of levels, and the entries of lists are "0", "1", ...

    Raises:
        UserError: The example has another form, the number of entries does not match the names, or two joined names
            are the same.
    """
    if isinstance(example, tuple | list):
        if tuple(names) == PAIR and len(example) == 3:
            names = (*PAIR, "weights")
        if len(example) != len(names):
            raise UserError(
                f"an example has {len(example)} entries, but {len(names)} names ({', '.join(names)}). Name each entry."
            )
        example = dict(zip(names, example, strict=True))
    if not isinstance(example, Mapping):
        raise UserError(f"an example must be a dict of arrays, or a tuple with names, got a {type(example).__name__}.")
    leaves: dict[str, Any] = {}
    for name, leaf in _leaves(example):
        if name in leaves:
            raise UserError(f"an example has {name!r} twice: nested, and under the joined name. Rename one.")
        leaves[name] = leaf
    return leaves


def _leaves(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields every leaf with its joined name; lists of numbers are leaves."""
    for key, value in tree.items():
        if isinstance(value, tuple | list) and any(_is_array_or_tree(item) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if not isinstance(value, Mapping):
            yield str(key), value
            continue
        for name, leaf in _leaves(value):
            yield f"{key}{SEPARATOR}{name}", leaf


def _is_array_or_tree(value: Any) -> bool:
    return isinstance(value, Mapping) or getattr(value, "ndim", 0) > 0


def as_array(value: Any, name: str) -> np.ndarray:
    """Returns a value as an array of numbers.

    Args:
        value: An array, a tensor of PyTorch or TensorFlow (on any device, with or without a gradient), a number, a list
            of numbers, or any other object with `__array__`.
        name: The name of the value, for messages.

    Raises:
        UserError: The value contains something other than numbers, or lists of different lengths.
    """
    try:
        if hasattr(value, "detach") and hasattr(value, "cpu"):
            value = value.detach().cpu()
        if callable(getattr(value, "numpy", None)):
            value = value.numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{name} must be an array of numbers, got a {type(value).__name__}: {reason}") from error
    if not is_numeric(array.dtype):
        raise UserError(f"{name} contains {array.dtype}; examples must be numbers. Convert it, or leave it out.")
    return array


def as_arrays(example: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns an example, or a batch of examples, as arrays by name; see `flat`.

    Args:
        example: A mapping, nested or not, or a tuple or list.
        names: The names of the entries of a tuple.

    Raises:
        UserError: The example has another form, or contains something other than numbers.
    """
    return {name: as_array(value, name) for name, value in flat(example, names).items()}


def with_weights(arrays: Mapping[str, np.ndarray], dims: int) -> dict[str, np.ndarray]:
    """Adds "weights" of 1 (float32) if missing: one for each row or, if targets are tokens, for each target.

    Targets are tokens if each row of inputs and of targets is a sequence of integers, of the same length.

    Args:
        arrays: Name -> array.
        dims: The number of leading row dims: 0 for one example, 1 for a batch.
    """
    if "weights" in arrays:
        return dict(arrays)
    shape = next(iter(arrays.values())).shape[:dims]
    if _targets_are_tokens(arrays, dims):
        shape = arrays["targets"].shape
    return {**arrays, "weights": np.ones(shape, np.float32)}


def _targets_are_tokens(arrays: Mapping[str, np.ndarray], dims: int) -> bool:
    """Returns True if each row of inputs and of targets is a sequence of integers, of the same length."""
    if "inputs" not in arrays or "targets" not in arrays:
        return False
    inputs = arrays["inputs"]
    targets = arrays["targets"]
    are_integers = inputs.dtype.kind in "iu" and targets.dtype.kind in "iu"
    return are_integers and targets.ndim == dims + 1 and inputs.shape == targets.shape


def count_rows(arrays: Mapping[str, np.ndarray], what: str, fix: str = "") -> int:
    """Returns the number of rows of arrays; a UserError about `what` if it differs or an array has no dim."""
    rows: dict[str, int | str] = {}
    for name, array in arrays.items():
        rows[name] = len(array) if array.ndim else "no dim"
    numbers = set(rows.values())
    if len(numbers) != 1 or "no dim" in numbers:
        raise UserError(f"{what} must have one row per example on dim 0; these have {rows}.{fix}")
    return int(numbers.pop())


def is_numeric(dtype: np.dtype) -> bool:
    """Returns True if values of a dtype are numbers, not objects, strings, times or records."""
    return dtype.kind not in "OSUMm" and dtype.names is None


def not_numeric(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the names and dtypes of the arrays that do not contain numbers, for messages; "" if all do."""
    wrong = [f"{name!r} contains {array.dtype}" for name, array in arrays.items() if not is_numeric(array.dtype)]
    return ", ".join(wrong)


def shapes_of(example: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each array of an example, by name."""
    return {name: (str(array.dtype), np.shape(array)) for name, array in sorted(example.items())}
