"""Examples in memory: NumPy arrays with one row per example, given directly or read from .npz files."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from ...mesh.errors import UserError
from ..config import DataConfig
from ..examples import count_rows, flat, not_numeric, shapes_of, with_weights
from ..source import BatchedSource, MappedFiles, Splits, divide_rows, find_part, fingerprint, splits_of
from ..value_ranges import Limit, Limits, check_source, check_vocabulary
from .source_files import find_files, raise_system_error, reason_of

WRITE = "Write it with np.savez(path, inputs=..., targets=...), both arrays of numbers with a row per example."


Origin = Callable[[int], str]
"""The function from a row to its file, and its number there."""


def origin_in(files: Sequence[tuple[str, int]]) -> Origin:
    """Returns the origin of rows that follow each other in files: pairs of a file and its number of rows."""

    starts = np.cumsum([0, *[count for _, count in files]])

    def describe(row: int) -> str:
        number, place = find_part(starts, row)
        path, _ = files[number]
        return f"row {place} of {path}"

    return describe


class ArraySource(BatchedSource):
    """Examples that are the rows of arrays in memory.

    Args:
        arrays: Name -> array with examples on dim 0, or nested mappings of them (see `examples.flat`). "weights" of 1
            (float32, see `with_weights`) are added if missing.
        origin: The origin of each row, for messages.

    Raises:
        UserError: Arrays or rows are missing, arrays have different numbers of rows, or are not numeric.
    """

    def __init__(self, arrays: Mapping[str, Any], origin: Origin | None = None) -> None:
        arrays = {name: np.asarray(array) for name, array in flat(arrays).items()}
        self._length = _count_rows(arrays)
        if not self._length:
            raise UserError("a split of arrays is empty; give more data, or omit the evaluation split.")
        self.arrays_in_memory = with_weights(arrays, 1)
        """The arrays themselves, with weights."""
        self._origin = origin
        self._files = MappedFiles.of_arrays(arrays.values())

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self._length

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the rows at `indices` (int64, (N,)) of each array.

        Raises:
            BadDataError: A mapped file was cut.
        """
        self._files.check()
        return {name: array[indices] for name, array in self.arrays_in_memory.items()}

    def rows(self, indices: np.ndarray) -> "ArraySource":
        """Returns some of the rows (int64, (N,)) as another source; copies them."""
        origin = self._origin
        if origin is None:
            return ArraySource(self.take(indices))
        return ArraySource(self.take(indices), lambda index: origin(int(indices[index])))

    def origin(self, index: int) -> str:
        """Returns file and row of example `index`; "" if it does not come from a file."""
        if self._origin is None:
            return ""
        return self._origin(index)


def from_arrays(
    train: Mapping[str, Any],
    evaluation: Mapping[str, Any] | None = None,
    *,
    eval_fraction: float = 0.0,
    vocabulary: int | None = None,
) -> Splits:
    """Makes splits of NumPy arrays.

    Args:
        train: Name -> array with examples on dim 0, such as {"inputs": float32 (N, F), "targets": int32 (N,)}.
            Several outputs may be nested: {"image": ..., "targets": {"label": ..., "box": ...}} reaches the loss as
            batch["targets/label"] and so on (see `nested`). "weights" of 1 are added if missing.
        evaluation: The held-out examples, with the same names.
        eval_fraction: The share of rows in [0, 1) to hold out if there is no `evaluation`, by the hash of the row's
            number; 0 for no evaluation split.
        vocabulary: Number of token ids, if the arrays are tokens.

    Returns:
        The splits. Arrays are copied only if `eval_fraction` divides them.

    Raises:
        UserError: Rows do not match, the two splits have different names, dtypes or row shapes, `eval_fraction` is out
            of range, holds out no row, or is given with `evaluation`.
        BadDataError: Inputs, targets or weights are not finite, weights are negative, or inputs are not token ids of
            the vocabulary. Arrays over 1 GiB are checked batch by batch instead.
    """
    if not isinstance(eval_fraction, Real) or not 0 <= eval_fraction < 1:
        raise UserError(f"from_arrays: eval_fraction={eval_fraction!r} must be a number from 0 to below 1.")
    if eval_fraction and evaluation is not None:
        raise UserError(f"give evaluation or eval_fraction={eval_fraction}, not both.")
    if evaluation is None:
        return divide_source(ArraySource(train), eval_fraction, vocabulary)
    return make_splits([ArraySource(train), ArraySource(evaluation)], vocabulary)


def make_splits(sources: Sequence[ArraySource], vocabulary: int | None = None) -> Splits:
    """Makes splits of training and, if given, evaluation examples.

    Args:
        sources: One or two sources.
        vocabulary: Number of token ids, if the arrays are tokens.

    Raises:
        UserError: The two have different names, dtypes or row shapes.
        BadDataError: See `from_arrays`.
    """
    forms = [shapes_of(source[0]) for source in sources]
    if forms[0] != forms[-1]:
        raise UserError(f"training examples are {forms[0]}, evaluation examples are {forms[1]}; both must be the same.")
    check_vocabulary(vocabulary)
    limits = Limits(inputs=Limit("vocabulary", vocabulary) if vocabulary else None)
    for name, source in zip(("training", "evaluation"), sources, strict=False):
        check_source(source, limits, name)
    sizes = " and ".join(f"{len(source):,}" for source in sources)
    without = "" if len(sources) > 1 else ", none for evaluation"
    arrays: list[np.ndarray] = []
    for source in sources:
        arrays += [array for _, array in sorted(source.arrays_in_memory.items())]
    description = f"arrays {', '.join(forms[0])} in memory: {sizes} examples{without}"
    return splits_of(sources, vocabulary, description, fingerprint(arrays, sorted(forms[0])))


def divide_source(source: ArraySource, eval_fraction: float, vocabulary: int | None = None) -> Splits:
    """Makes splits of the rows of one source; see `source.divide_rows`.

    Args:
        source: All examples.
        eval_fraction: The share of rows to hold out, in [0, 1); 0 for no evaluation split.
        vocabulary: Number of token ids, if the arrays are tokens.

    Raises:
        UserError: A split would have no rows.
        BadDataError: See `from_arrays`.
    """
    rows_of_splits = divide_rows(len(source), eval_fraction)
    if len(rows_of_splits) == 1:
        return make_splits([source], vocabulary)
    return make_splits([source.rows(rows) for rows in rows_of_splits], vocabulary)


def read_arrays(config: DataConfig) -> Splits:
    """Reads .npz files of arrays; rows of several files follow each other.

    Args:
        config: `files`, and `eval_files` or `eval_fraction` (rows are held out by the hash of their number).

    Raises:
        UserError: A pattern does not match any file, or the files' arrays do not fit together.
    """
    source = _load(config.files, "data.files")
    vocabulary = config.vocabulary or None
    if config.eval_files:
        return make_splits([source, _load(config.eval_files, "data.eval_files")], vocabulary)
    return divide_source(source, config.eval_fraction, vocabulary)


def _load(patterns: tuple[str, ...], key: str) -> ArraySource:
    """Returns the rows of all files."""
    parts = [(file.path, _read_npz(file.path, key)) for file in find_files(patterns, key=key, suffixes=(".npz",))]
    forms = [{name: array.shape[1:] for name, array in arrays.items()} for _, arrays in parts]
    for (path, _), form in zip(parts, forms, strict=True):
        if form != forms[0]:
            raise UserError(f"{key}: rows of {path} are {form}, but those of {parts[0][0]} are {forms[0]}.")
    origin = origin_in([(str(path), len(next(iter(arrays.values())))) for path, arrays in parts])
    return ArraySource({name: np.concatenate([arrays[name] for _, arrays in parts]) for name in forms[0]}, origin)


def _read_npz(path: Path, key: str) -> dict[str, np.ndarray]:
    """Returns the arrays of one file."""
    try:
        with path.open("rb") as file, np.load(file) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # NumPy raises any of several types for invalid content
        raise_system_error(error)
        raise UserError(f"{key}: {path} cannot be read as .npz: {reason_of(error)}. {WRITE}") from None
    try:
        _count_rows(arrays)
    except UserError as error:
        raise UserError(f"{key}: {path}: {error} {WRITE}") from None
    return arrays


def _count_rows(arrays: Mapping[str, np.ndarray]) -> int:
    """Returns the number of rows; a UserError if arrays are not numeric or have different numbers of rows."""
    wrong = not_numeric(arrays)
    if wrong:
        raise UserError(f"arrays must contain numbers; {wrong}. Convert or remove them.")
    return count_rows(arrays, "all arrays")
