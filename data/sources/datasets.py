"""Datasets of other libraries with random access: anything with `len` and `[i]`, and tables of columns.

Examples are a PyTorch `Dataset`, a Hugging Face `Dataset`, a list of examples, a pandas or Polars `DataFrame`. Examples
are read when batches need them; the order is the runtime's, as for every source with random access.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...mesh.errors import UserError, counted
from ...parallel.model.user_errors import as_user_error
from ..examples import PAIR, as_array, as_arrays, shapes_of, with_weights
from ..source import MappedFiles, Splits, divide_rows, fingerprint, splits_of, spread_indices
from ..value_ranges import check_vocabulary
from .arrays import from_arrays

SAMPLED = 16
"""Examples, evenly spread, that the fingerprint of a dataset covers."""


class DatasetSource:
    """The examples of a map-style dataset.

    Args:
        dataset: Anything with `len` and `[i]`; its `__getitems__`, if any, reads many at once.
        names: The names of the entries of an example, if examples are tuples.
        rows: int64, the numbers of the examples; None: all.
    """

    def __init__(self, dataset: Any, names: Sequence[str] = PAIR, rows: np.ndarray | None = None) -> None:
        self._dataset, self._names, self._rows = dataset, names, rows
        files = [entry["filename"] for entry in getattr(dataset, "cache_files", None) or ()]  # of Hugging Face
        self._files = MappedFiles({path: os.path.getsize(path) for path in files if os.path.isfile(path)})

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self._dataset) if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Returns example `index`."""
        row = self._row(index)
        self._files.check()
        with self._reading(row):
            return with_weights(as_arrays(self._dataset[row], self._names), 0)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at `indices` (int64, (N,)), stacked on dim 0.

        Raises:
            UserError: Examples differ in names, dtypes or shapes, or the dataset raises an error.
            BadDataError: A mapped file was cut.
        """
        self._files.check()
        rows = [self._row(int(index)) for index in indices]
        with self._reading(rows[0], *rows[-1:]):
            many = getattr(self._dataset, "__getitems__", None)
            found = many(rows) if many is not None else [self._dataset[row] for row in rows]
            examples = [as_arrays(example, self._names) for example in found]
            if len(examples) != len(rows):
                raise UserError(
                    f"{type(self._dataset).__name__}.__getitems__ was asked for {counted(len(rows), 'example')}, and "
                    f"returned {len(examples):,}. It must return one example for each number, in this order."
                )
            first = shapes_of(examples[0])
            for row, example in zip(rows, examples, strict=True):
                if shapes_of(example) != first:
                    raise UserError(
                        f"example {rows[0]} has {first}, but example {row} has {shapes_of(example)}; all must have the "
                        "same names, dtypes and shapes. Pad them, with weights of 0."
                    )
        return with_weights({name: np.stack([each[name] for each in examples]) for name in examples[0]}, 1)

    def origin(self, index: int) -> str:
        """Returns the name of an example in messages."""
        return f"example {self._row(index)} of the {type(self._dataset).__name__}"

    def _row(self, index: int) -> int:
        return int(index if self._rows is None else self._rows[index])

    def _reading(self, *rows: int):
        which = " to ".join(map(str, dict.fromkeys(rows)))
        what = f"reading example {which} of the {type(self._dataset).__name__}"
        return as_user_error(what, type(self._dataset), passes=lambda error: isinstance(error, OSError | MemoryError))


def from_dataset(
    train: Any,
    evaluation: Any = None,
    *,
    names: Sequence[str] = PAIR,
    eval_fraction: float = 0.0,
    vocabulary: int | None = None,
    varies: bool = False,
) -> Splits:
    """Makes splits of datasets with random access, whose examples are read when batches need them.

    Args:
        train: Anything with `len` and `[i]`, such as a PyTorch or Hugging Face `Dataset` or a list. An example is a
            mapping of numbers, arrays and tensors, nested or not, or a tuple of them; all have the same shapes.
            "weights" of 1 are added if missing.
        evaluation: The held-out examples, likewise.
        names: The names of the entries of a tuple.
        eval_fraction: The share to hold out if there is no `evaluation`, by the hash of the example's number.
        vocabulary: Number of token ids, if examples are tokens.
        varies: An example may differ every time it is read, as with random augmentation. A run is then not
            reproducible, and processes that hold the same rows read different ones.

    Returns:
        The splits. Their fingerprint is that of 16 examples, evenly spread; unknown if examples vary.

    Raises:
        UserError: It has no length or no examples, examples have another form, or the first one differs when it is read
            again and `varies` is not set.
    """
    check_vocabulary(vocabulary)
    given = [dataset for dataset in (train, evaluation) if dataset is not None]
    for dataset in given:
        _check_random_access(dataset)
    sources = [DatasetSource(dataset, names) for dataset in given]
    if evaluation is None and eval_fraction:
        sources = [DatasetSource(train, names, rows) for rows in divide_rows(len(train), eval_fraction)]
    if not varies and fingerprint(_arrays(sources[0], 0)) != fingerprint(_arrays(sources[0], 0)):
        raise UserError(
            f"the first example of the {type(train).__name__} differs when it is read again: a run could not be "
            "repeated or resumed exactly. Derive randomness from the example's number (numpy.random.default_rng(i)), "
            "or pass varies=True to from_dataset."
        )
    sizes = " and ".join(f"{len(source):,}" for source in sources)
    sampled = [(source, index) for source in sources for index in spread_indices(len(source), SAMPLED)]
    arrays = (array for each in sampled for array in _arrays(*each))
    known = "" if varies else fingerprint(arrays, sizes, sorted(sources[0][0]))
    return splits_of(sources, vocabulary, f"{type(train).__name__}: {sizes} examples", known)


def from_frame(
    train: Any,
    evaluation: Any = None,
    *,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    eval_fraction: float = 0.0,
    vocabulary: int | None = None,
) -> Splits:
    """Makes splits of a table in memory, each row an example.

    Args:
        train: A `DataFrame` of pandas or Polars, a table of Arrow, or a mapping of names to columns; neither library is
            required. Cells are numbers, or arrays or lists of one shape.
        evaluation: The held-out examples, likewise.
        columns: Name of an array -> its column, or the columns that are stacked on its last dim:
            {"inputs": ["x", "y"], "targets": "label"}. None: every column is an array of its name.
        eval_fraction: The share to hold out if there is no `evaluation`, by the hash of the row's number.
        vocabulary: Number of token ids, if the table contains tokens.

    Returns:
        The splits, with the columns copied into arrays.

    Raises:
        UserError: A column is missing, or is not numeric.
        BadDataError: See `from_arrays`.
    """
    held_out = None if evaluation is None else _columns(evaluation, columns)
    return from_arrays(_columns(train, columns), held_out, eval_fraction=eval_fraction, vocabulary=vocabulary)


def _columns(frame: Any, columns: Mapping[str, str | Sequence[str]] | None) -> dict[str, np.ndarray]:
    """Returns the arrays of a table."""
    names = frame if isinstance(frame, Mapping) else getattr(frame, "column_names", getattr(frame, "columns", None))
    if names is None:
        raise UserError(f"expected a DataFrame, an Arrow table or a mapping of columns, got a {type(frame).__name__}.")
    known = [str(column) for column in names]
    columns = columns or {name: name for name in known}
    wanted = [name for names in columns.values() for name in ([names] if isinstance(names, str) else names)]
    if missing := [name for name in wanted if name not in known]:
        raise UserError(f"unknown column {missing[0]!r}; the columns of the table are {', '.join(known)}.")

    def array(names: str | Sequence[str]) -> np.ndarray:
        if isinstance(names, str):
            return _column(frame, names)
        return np.stack([_column(frame, name) for name in names], axis=-1)

    return {name: array(names) for name, names in columns.items()}


def _column(frame: Any, name: str) -> np.ndarray:
    """Returns one column; cells that are arrays or lists are stacked."""
    found = frame[name].to_numpy() if hasattr(frame[name], "to_numpy") else as_array(frame[name], f"column {name!r}")
    if found.dtype == object and len(found) and np.ndim(found[0]):
        cells = [as_array(cell, f"a cell of column {name!r}") for cell in found]
        shapes = {cell.shape for cell in cells}
        if len(shapes) > 1:
            raise UserError(f"the cells of column {name!r} have the shapes {sorted(shapes)}; all must have the same.")
        return np.stack(cells)
    return as_array(found, f"column {name!r}")


def _check_random_access(dataset: Any) -> None:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserError(
            f"a {type(dataset).__name__} does not support random access (`len` and `[i]`). Give iterables to "
            "spmdkit.data.from_batches or from_examples."
        )
    if not len(dataset):
        raise UserError(f"the {type(dataset).__name__} is empty; give examples, or omit the evaluation split.")


def _arrays(source: DatasetSource, index: int) -> list[np.ndarray]:
    """Returns the arrays of one example, by name."""
    return [array for _, array in sorted(source[index].items())]
