"""Examples in memory: NumPy arrays with one row per example, given directly or read from .npz files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...mesh.errors import UserError
from ..config import DataConfig
from ..examples import flat, is_numeric, shapes_of, with_weights
from ..source import Splits, fingerprint
from ..value_ranges import Limit, Limits, check_source, check_vocabulary
from .source_files import find_files, raise_system_error, reason_of
from .texts import hold_out

WRITE = "Write it with np.savez(path, inputs=..., targets=...), both arrays of numbers with a row per example."


class Origin(NamedTuple):
    """The files that the rows of arrays come from.

    Attributes:
        files: Each file and its number of rows, in order.
        rows: Numbers of the rows that are kept, counted over all files; None: all.
    """

    files: list[tuple[str, int]]
    rows: np.ndarray | None = None

    def describe(self, index: int) -> str:
        """Returns file, and row in that file, of the row at `index`."""
        row = int(index if self.rows is None else self.rows[index])
        for path, count in self.files:
            if row < count:
                return f"row {row} of {path}"
            row -= count
        return ""


class ArraySource:
    """Examples that are the rows of arrays in memory.

    Args:
        arrays: Name -> array with examples on dim 0, or nested mappings of them (see `examples.flat`). "weights" of 1
            (float32, see `with_weights`) are added if missing.
        origin: The files that the rows come from, for messages.

    Raises:
        UserError: Arrays or rows are missing, arrays have different numbers of rows, or are not numeric.
    """

    def __init__(self, arrays: Mapping[str, Any], origin: Origin | None = None) -> None:
        arrays = {name: np.asarray(array) for name, array in flat(arrays).items()}
        _check_rows(arrays)
        self._length = len(next(iter(arrays.values())))
        if not self._length:
            raise UserError("a split of arrays is empty; give more data, or omit the evaluation split.")
        self._arrays = with_weights(arrays, 1)
        self._origin = origin

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Returns row `index` of each array."""
        return {name: np.asarray(array[index]) for name, array in self._arrays.items()}

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the rows at `indices` (int64, (N,)) of each array."""
        return {name: array[indices] for name, array in self._arrays.items()}

    @property
    def arrays_in_memory(self) -> dict[str, np.ndarray]:
        """The arrays themselves, with weights."""
        return self._arrays

    def origin(self, index: int) -> str:
        """Returns file and row of example `index`; "" if it does not come from a file."""
        return self._origin.describe(index) if self._origin else ""


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
    if not 0 <= eval_fraction < 1:
        raise UserError(f"from_arrays: eval_fraction={eval_fraction} must be from 0 to below 1.")
    if eval_fraction and evaluation is not None:
        raise UserError(f"from_arrays: give evaluation or eval_fraction={eval_fraction}, not both.")
    if eval_fraction:
        rows = {name: np.asarray(array) for name, array in flat(train).items()}
        ArraySource(rows)  # checks the rows before they are divided
        return held_out_rows(rows, eval_fraction, vocabulary)
    return make_splits(flat(train), None if evaluation is None else flat(evaluation), vocabulary)


def make_splits(
    train: Mapping[str, np.ndarray],
    evaluation: Mapping[str, np.ndarray] | None,
    vocabulary: int | None = None,
    origins: tuple[Origin | None, Origin | None] = (None, None),
) -> Splits:
    """Makes splits like `from_arrays`, with the files that the rows of both splits come from."""
    given = [
        (arrays, origin) for arrays, origin in zip((train, evaluation), origins, strict=True) if arrays is not None
    ]
    splits = [ArraySource(arrays, origin) for arrays, origin in given]
    if evaluation is not None:
        forms = [shapes_of({name: np.asarray(a)[:0] for name, a in arrays.items()}) for arrays in (train, evaluation)]
        if forms[0] != forms[1]:
            rows = [shapes_of(split[0]) for split in splits]
            raise UserError(
                f"training examples are {rows[0]}, evaluation examples are {rows[1]}; both must be the same."
            )
    check_vocabulary(vocabulary)
    limits = Limits(inputs=Limit("vocabulary", vocabulary) if vocabulary else None)
    for name, split in zip(("training", "evaluation"), splits, strict=False):
        check_source(split, limits, name)
    sizes = " and ".join(f"{len(split):,}" for split in splits)
    without = "" if evaluation is not None else ", none for evaluation"
    all_arrays = [np.asarray(array) for arrays in (train, evaluation or {}) for _, array in sorted(arrays.items())]
    return Splits(
        train=splits[0],
        evaluation=splits[1] if evaluation is not None else None,
        vocabulary=vocabulary,
        description=f"arrays {', '.join(train)} in memory: {sizes} examples{without}",
        fingerprint=fingerprint(all_arrays, sorted(train)),
    )


def read_arrays(config: DataConfig) -> Splits:
    """Reads .npz files of arrays; rows of several files follow each other.

    Args:
        config: `files`, and `eval_files` or `eval_fraction` (rows are held out by the hash of their number).

    Raises:
        UserError: A pattern does not match any file, or the files' arrays do not fit together.
    """
    arrays, origin = _load(config.files, "data.files")
    if config.eval_files:
        evaluation, eval_origin = _load(config.eval_files, "data.eval_files")
        return make_splits(arrays, evaluation, config.vocabulary or None, (origin, eval_origin))
    return held_out_rows(arrays, config.eval_fraction, config.vocabulary or None, origin)


def held_out_rows(
    arrays: Mapping[str, np.ndarray], eval_fraction: float, vocabulary: int | None = None, origin: Origin | None = None
) -> Splits:
    """Splits arrays by row: a row is held out if the hash of its number is below `eval_fraction`.

    Args:
        arrays: Name -> array with examples on dim 0.
        eval_fraction: The share of rows to hold out, in [0, 1); 0 for no evaluation split.
        vocabulary: Number of token ids, if the arrays are tokens.
        origin: The files that the rows come from.

    Raises:
        UserError: A split would have no rows.
        BadDataError: See `from_arrays`.
    """
    rows = len(next(iter(arrays.values())))
    held_out = hold_out(rows, eval_fraction)
    if held_out.all() or (eval_fraction and not held_out.any()):
        raise UserError(
            f"data.eval_fraction={eval_fraction} of {rows:,} rows holds out {held_out.sum():,}: both splits need rows. "
            "Give more rows, change data.eval_fraction, or set it to 0 to train without evaluation."
        )
    evaluation = {name: array[held_out] for name, array in arrays.items()} if eval_fraction else None
    origins = [origin and origin._replace(rows=np.flatnonzero(kept)) for kept in (~held_out, held_out)]
    train = {name: array[~held_out] for name, array in arrays.items()}
    return make_splits(train, evaluation, vocabulary, (origins[0], origins[1]))


def _check_rows(arrays: Mapping[str, np.ndarray]) -> None:
    """Raises a UserError if arrays are not numeric, or do not have the same number of rows."""
    wrong = [f"{name!r} contains {array.dtype}" for name, array in arrays.items() if not is_numeric(array.dtype)]
    if wrong:
        raise UserError(f"arrays must contain numbers; {', '.join(wrong)}. Convert or remove them.")
    rows = {name: array.shape[0] if array.ndim else "no dim" for name, array in arrays.items()}
    if len(set(rows.values())) != 1 or "no dim" in rows.values():
        raise UserError(f"all arrays must have one row per example on dim 0; these have {rows}.")


def _load(patterns: tuple[str, ...], key: str) -> tuple[dict[str, np.ndarray], Origin]:
    """Returns the arrays of all files, concatenated by name, and the origin of their rows."""
    parts = [(file.path, _read_npz(file.path, key)) for file in find_files(patterns, key=key, suffixes=(".npz",))]
    first_path, first = parts[0]
    for path, arrays in parts[1:]:
        if arrays.keys() != first.keys():
            raise UserError(f"{key}: {path} has the arrays {[*arrays]}, but {first_path} has {[*first]}.")
        for name, array in arrays.items():
            if array.shape[1:] != first[name].shape[1:]:
                raise UserError(
                    f"{key}: rows of {name!r} have shape {array.shape[1:]} in {path} and {first[name].shape[1:]} in "
                    f"{first_path}; all files must have the same."
                )
    origin = Origin([(str(path), len(next(iter(arrays.values()), ()))) for path, arrays in parts])
    return {name: np.concatenate([arrays[name] for _, arrays in parts]) for name in first}, origin


def _read_npz(path: Path, key: str) -> dict[str, np.ndarray]:
    """Returns the arrays of one file."""
    try:
        with path.open("rb") as file, np.load(file) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # NumPy raises any of several types for invalid content
        raise_system_error(error)
        raise UserError(f"{key}: {path} cannot be read as .npz: {reason_of(error)}. {WRITE}") from None
    try:
        _check_rows(arrays)
    except UserError as error:
        raise UserError(f"{key}: {path}: {error} {WRITE}") from None
    return arrays
