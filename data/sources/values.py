"""What other libraries give, as NumPy arrays: tensors, scalars, lists, images."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...mesh.errors import UserError
from ..names import PAIR, flat


def as_array(value: Any, name: str) -> np.ndarray:
    """A value as an array of numbers.

    Args:
        value: An array, a tensor of PyTorch or TensorFlow (wherever it is, with a gradient or without), a number, a
            list of numbers, or anything else with `__array__`.
        name: What it is, for messages.

    Raises:
        UserError: it holds something but numbers, or lists of different lengths.
    """
    try:
        if hasattr(value, "detach") and hasattr(value, "cpu"):
            value = value.detach().cpu()
        array = np.asarray(value.numpy() if callable(getattr(value, "numpy", None)) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{name} is a {type(value).__name__} that is no array of numbers: {reason}") from error
    if is_no_number(array.dtype):
        raise UserError(f"{name} holds {array.dtype}; examples hold numbers. Convert it, or leave it out.")
    return array


def as_arrays(example: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """An example, or a batch of them, as arrays by name; see `names.flat`.

    Args:
        example: A mapping, nested or not, or a tuple or list.
        names: What the entries of a tuple are.

    Raises:
        UserError: it has no such form, or holds something but numbers.
    """
    return {name: as_array(value, name) for name, value in flat(example, names).items()}


def with_weights(arrays: Mapping[str, np.ndarray], dims: int) -> dict[str, np.ndarray]:
    """Adds "weights" of 1 (float32) if there are none: one for each row or, if targets are tokens, for each target.

    Targets are tokens if each row of inputs and of targets is a sequence of integers, of the same length.

    Args:
        arrays: Name -> array.
        dims: Leading dims of rows: 0 for one example, 1 for a batch.
    """
    if "weights" in arrays:
        return dict(arrays)
    pair = [arrays[name] for name in PAIR if name in arrays]
    sequences = len(pair) == 2 and all(array.dtype.kind in "iu" and array.ndim == dims + 1 for array in pair)
    tokens = sequences and pair[0].shape == pair[1].shape
    shape = pair[1].shape if tokens else next(iter(arrays.values())).shape[:dims]
    return {**arrays, "weights": np.ones(shape, np.float32)}


def is_no_number(dtype: np.dtype) -> bool:
    """Whether values are objects, texts, times or records."""
    return dtype.kind in "OSUMm" or dtype.names is not None
