"""Examples that are in memory: NumPy arrays with one row per example, given directly or read from .npz files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...mesh.errors import UserError
from ..config import DataConfig
from ..names import flat
from ..ranges import Limit, Limits, check_source, check_vocabulary
from ..source import Splits, fingerprint
from .files import find_files
from .texts.documents import hash_fraction
from .values import is_no_number, with_weights


class Origin(NamedTuple):
    """Where the rows of arrays come from.

    Attributes:
        files: Each file and how many rows it gave, in their order.
        rows: Numbers of the rows that are kept, counted over all files; None: all.
    """

    files: Sequence[tuple[str, int]]
    rows: np.ndarray | None = None

    def describe(self, index: int) -> str:
        """File and row, in that file, of the row at `index`."""
        row = int(index if self.rows is None else self.rows[index])
        for path, count in self.files:
            if row < count:
                return f"row {row} of {path}"
            row -= count
        return ""


class ArraySource:
    """Examples that are the rows of arrays in memory.

    Args:
        arrays: Name -> array with examples on dim 0, or nested mappings of them (see `names`). "weights" of 1 (float32,
            see `with_weights`) are added if absent.
        origin: Where the rows come from, for messages.

    Raises:
        UserError: no arrays, no rows, arrays with different numbers of rows, or arrays of something but numbers.
    """

    def __init__(self, arrays: Mapping[str, Any], origin: Origin | None = None) -> None:
        arrays = {name: np.asarray(array) for name, array in flat(arrays).items()}
        rows = {name: array.shape[0] if array.ndim else "no dim" for name, array in arrays.items()}
        if len(set(rows.values())) != 1 or "no dim" in rows.values():
            raise UserError(f"the arrays of a source have one row per example on dim 0; these have {rows}.")
        no_numbers = [f"{name} holds {array.dtype}" for name, array in arrays.items() if is_no_number(array.dtype)]
        if no_numbers:
            raise UserError(f"the arrays of a source hold numbers; {', '.join(no_numbers)}. Convert or remove them.")
        self._length = len(next(iter(arrays.values())))
        if not self._length:
            raise UserError("a split of arrays holds no rows; give more data, or no evaluation split.")
        self._arrays = with_weights(arrays, 1)
        self._origin = origin

    def __len__(self) -> int:
        """Number of rows."""
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Row `index` of each array."""
        return {name: np.asarray(array[index]) for name, array in self._arrays.items()}

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at `indices` (int64, (N,)) of each array."""
        return {name: array[indices] for name, array in self._arrays.items()}

    @property
    def arrays_in_memory(self) -> dict[str, np.ndarray]:
        """The arrays themselves, weights among them."""
        return self._arrays

    def origin(self, index: int) -> str:
        """File and row of example `index`; "" where it is from no file."""
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
            batch["targets/label"] and so on (see `nested`). "weights" of 1 are added if absent.
        evaluation: The same names for held-out examples.
        eval_fraction: Without `evaluation`, the share of rows in [0, 1) to hold out, by the hash of the row's number; 0
            for no evaluation split.
        vocabulary: Number of token ids, where the arrays hold tokens.

    Returns:
        The splits. Arrays are copied only if `eval_fraction` divides them.

    Raises:
        UserError: rows do not match, the two splits have different names, dtypes or row shapes, `eval_fraction` is out
            of range, holds out no row, or is given beside `evaluation`.
        BadDataError: inputs, targets or weights are not finite, weights are negative, or inputs are no token ids of
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
    """Makes splits as `from_arrays` does, with the files that the rows of both splits come from."""
    given = [
        (arrays, origin) for arrays, origin in zip((train, evaluation), origins, strict=True) if arrays is not None
    ]
    splits = [ArraySource(arrays, origin) for arrays, origin in given]
    if evaluation is not None:
        _check_alike(train, evaluation)
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
        UserError: a pattern matches nothing, or the files' arrays do not fit together.
    """
    arrays, origin = _load(config.files, "data.files")
    if config.eval_files:
        evaluation, eval_origin = _load(config.eval_files, "data.eval_files")
        return make_splits(arrays, evaluation, config.vocabulary or None, (origin, eval_origin))
    return held_out_rows(arrays, config.eval_fraction, config.vocabulary or None, origin)


def held_out_rows(
    arrays: Mapping[str, np.ndarray], eval_fraction: float, vocabulary: int | None = None, origin: Origin | None = None
) -> Splits:
    """Splits arrays by row: a row is held out when the hash of its number falls below `eval_fraction`.

    Args:
        arrays: Name -> array with examples on dim 0.
        eval_fraction: Share of rows to hold out, in [0, 1); 0 for no evaluation split.
        vocabulary: Number of token ids, where the arrays hold tokens.
        origin: Where the rows come from.

    Raises:
        UserError: a split would hold no rows.
        BadDataError: as `from_arrays`.
    """
    rows = len(next(iter(arrays.values())))
    held_out = np.array([hash_fraction(b"%d" % row) < eval_fraction for row in range(rows)], bool)
    if held_out.all() or (eval_fraction and not held_out.any()):
        raise UserError(
            f"data.eval_fraction={eval_fraction} of {rows:,} rows holds out {held_out.sum():,}: both splits need rows. "
            "Give more rows, change data.eval_fraction, or set it to 0 to go without evaluation."
        )
    evaluation = {name: array[held_out] for name, array in arrays.items()} if eval_fraction else None
    origins = [origin and origin._replace(rows=np.flatnonzero(kept)) for kept in (~held_out, held_out)]
    train = {name: array[~held_out] for name, array in arrays.items()}
    return make_splits(train, evaluation, vocabulary, (origins[0], origins[1]))


def _load(patterns: tuple[str, ...], key: str) -> tuple[dict[str, np.ndarray], Origin]:
    """The arrays of all files, concatenated by name, and where their rows come from."""
    parts = []
    for file in find_files(patterns, key=key, suffixes=(".npz",)):
        parts.append((file.path, _read_npz(file.path, key)))
    first_path, first = parts[0]
    for path, arrays in parts[1:]:
        if arrays.keys() != first.keys():
            raise UserError(f"{key}: {path} holds the arrays {[*arrays]}, but {first_path} holds {[*first]}.")
        for name, array in arrays.items():
            if array.shape[1:] != first[name].shape[1:]:
                raise UserError(
                    f"{key}: rows of {name!r} have shape {array.shape[1:]} in {path} and {first[name].shape[1:]} in "
                    f"{first_path}; all files need the same."
                )
    origin = Origin([(str(path), len(next(iter(arrays.values()), ()))) for path, arrays in parts])
    return {name: np.concatenate([arrays[name] for _, arrays in parts]) for name in first}, origin


def _read_npz(path: Path, key: str) -> dict[str, np.ndarray]:
    """The arrays of one file: numbers, with the same number of rows."""
    remedy = "Write it with np.savez(path, inputs=..., targets=...), both arrays of numbers with a row per example."
    try:
        with path.open("rb") as file, np.load(file) as archive:  # of an .npy file under another name, an array
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, MemoryError) as error:
        if isinstance(error, MemoryError) or error.errno is not None:
            raise
        raise UserError(f"{key}: {path} cannot be read as .npz: {error}. {remedy}") from None
    except Exception as error:  # whatever parsing garbage raises; objects are refused, since they are programs
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{key}: {path} cannot be read as .npz: {reason.rstrip('.')}. {remedy}") from None
    rows = {name: array.shape[0] if array.ndim else "no dim" for name, array in arrays.items()}
    wrong = [f"{name!r} holds {array.dtype}" for name, array in arrays.items() if is_no_number(array.dtype)]
    if wrong or not arrays:
        raise UserError(f"{key}: {path}: {', '.join(wrong) or 'it holds no arrays'}. {remedy}")
    if len(set(rows.values())) != 1 or "no dim" in rows.values():
        raise UserError(f"{key}: {path}: its arrays have {rows} rows; each has one row per example on dim 0.")
    return arrays


def _check_alike(train: Mapping[str, np.ndarray], evaluation: Mapping[str, np.ndarray]) -> None:
    """Raises where the splits' examples differ in form."""
    forms = [
        {name: (str(np.asarray(array).dtype), np.shape(array)[1:]) for name, array in arrays.items()}
        for arrays in (train, evaluation)
    ]
    if forms[0] != forms[1]:
        raise UserError(f"training examples are {forms[0]}, evaluation examples are {forms[1]}; they must be alike.")
