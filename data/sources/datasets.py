"""Datasets of other libraries with random access: anything with `len` and `[i]`, and tables of columns.

A PyTorch `Dataset`, a Hugging Face `Dataset`, a list of examples, a pandas or Polars `DataFrame`. Their examples are
read where batches need them; the order is the runtime's, as that of every source with random access.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...mesh.errors import UserError
from ...mesh.user_errors import told_as_users
from ..names import PAIR
from ..ranges import check_vocabulary
from ..source import Splits, fingerprint
from .arrays import from_arrays, held_out_rows
from .texts.documents import hash_fraction
from .values import as_array, as_arrays, with_weights

NAMES = PAIR
LOOKED_AT = 16
"""Examples, evenly spread, that the fingerprint of a dataset is made of."""


class DatasetSource:
    """The examples of a map-style dataset.

    Args:
        dataset: Anything with `len` and `[i]`; one with `__getitems__` is asked for many at once.
        names: What the entries of an example are, where examples are tuples.
        rows: int64, which examples there are; None: all.
    """

    def __init__(self, dataset: Any, names: Sequence[str] = NAMES, rows: np.ndarray | None = None) -> None:
        self._dataset, self._names, self._rows = dataset, names, rows

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._dataset) if self._rows is None else len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Example `index`."""
        row = self._row(index)
        with self._told(row):
            return with_weights(as_arrays(self._dataset[row], self._names), 0)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices` (int64, (N,)), stacked on dim 0.

        Raises:
            UserError: examples differ in names, dtypes or shapes, or the dataset raises something.
        """
        rows = [self._row(int(index)) for index in indices]
        with self._told(rows[0], *rows[-1:]):
            many = getattr(self._dataset, "__getitems__", None)
            found = many(rows) if many is not None else [self._dataset[row] for row in rows]
            examples = [as_arrays(example, self._names) for example in found]
            _check_stackable(examples, rows)
        return with_weights({name: np.stack([each[name] for each in examples]) for name in examples[0]}, 1)

    def origin(self, index: int) -> str:
        """Which example of the dataset it is."""
        return f"example {self._row(index)} of the {type(self._dataset).__name__}"

    def _row(self, index: int) -> int:
        return int(index if self._rows is None else self._rows[index])

    def _told(self, *rows: int):
        which = " to ".join(map(str, dict.fromkeys(rows)))
        what = f"reading example {which} of the {type(self._dataset).__name__}"
        return told_as_users(what, type(self._dataset), passes=lambda error: isinstance(error, OSError | MemoryError))


def from_dataset(
    train: Any,
    evaluation: Any = None,
    *,
    names: Sequence[str] = NAMES,
    eval_fraction: float = 0.0,
    vocabulary: int | None = None,
    varies: bool = False,
) -> Splits:
    """Makes splits of datasets with random access, whose examples are read where they are needed.

    Args:
        train: Anything with `len` and `[i]`, such as a PyTorch or Hugging Face `Dataset` or a list. An example is a
            mapping of numbers, arrays and tensors, nested or not, or a tuple of them; all have the same shapes.
            "weights" of 1 are added if absent.
        evaluation: The same for held-out examples.
        names: What the entries of a tuple are.
        eval_fraction: Without `evaluation`, the share that is held out, by the hash of the example's number.
        vocabulary: Number of token ids, where examples hold tokens.
        varies: Whether an example may be another every time it is read, as under random augmentation. A run cannot be
            repeated then, and processes that share rows (another mesh axis tells them apart) read different ones.

    Returns:
        The splits. Their fingerprint is that of 16 examples, evenly spread; unknown where examples vary.

    Raises:
        UserError: it has no length or no examples, examples are of no such form, or the first one is another when it is
            read again and `varies` is not set.
    """
    check_vocabulary(vocabulary)
    for given in (train, evaluation):
        _check_random_access(given)
    if evaluation is None and eval_fraction:
        held_out = np.array([hash_fraction(b"%d" % row) < eval_fraction for row in range(len(train))], bool)
        sources = [DatasetSource(train, names, np.flatnonzero(kept)) for kept in (~held_out, held_out)]
    else:
        sources = [DatasetSource(each, names) for each in (train, evaluation) if each is not None]
    if not all(map(len, sources)):
        raise UserError(
            f"eval_fraction={eval_fraction} of {len(train):,} examples leaves a split without any. Give more examples, "
            "or another share."
        )
    if not varies and not _same(sources[0][0], sources[0][0]):
        raise UserError(
            f"the first example of the {type(train).__name__} is another when it is read again: a run could not be "
            "repeated or resumed exactly. Draw what is random from the example's number (numpy.random.default_rng(i)), "
            "or pass varies=True to from_dataset."
        )
    sizes = " and ".join(f"{len(source):,}" for source in sources)
    return Splits(
        train=sources[0],
        evaluation=sources[1] if len(sources) > 1 else None,
        vocabulary=vocabulary,
        description=f"{type(train).__name__}: {sizes} examples",
        fingerprint="" if varies else fingerprint(*_looked_at(sources)),
    )


def from_frame(
    train: Any,
    evaluation: Any = None,
    *,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    eval_fraction: float = 0.0,
    vocabulary: int | None = None,
) -> Splits:
    """Makes splits of a table in memory, a row an example.

    Args:
        train: A `DataFrame` of pandas or Polars, a table of Arrow, or a mapping of names to columns; neither library is
            needed. Cells are numbers, or arrays or lists of one shape.
        evaluation: The same for held-out examples.
        columns: Name of an array -> the column it is, or the columns that are stacked on its last dim:
            {"inputs": ["x", "y"], "targets": "label"}. None: every column is an array of its name.
        eval_fraction: Without `evaluation`, the share that is held out, by the hash of the row's number.
        vocabulary: Number of token ids, where the table holds tokens.

    Returns:
        The splits, with the columns copied into arrays.

    Raises:
        UserError: a column is missing, or holds something but numbers.
        BadDataError: As `from_arrays`.
    """
    arrays = _columns(train, columns)
    if evaluation is None and eval_fraction:
        return held_out_rows(arrays, eval_fraction, vocabulary)
    return from_arrays(arrays, None if evaluation is None else _columns(evaluation, columns), vocabulary=vocabulary)


def _columns(frame: Any, columns: Mapping[str, str | Sequence[str]] | None) -> dict[str, np.ndarray]:
    """The arrays of a table."""
    names = frame if isinstance(frame, Mapping) else getattr(frame, "column_names", getattr(frame, "columns", None))
    if names is None:
        raise UserError(
            f"a {type(frame).__name__} has no columns; give a DataFrame of pandas or Polars, a table of Arrow, or a "
            "mapping of names to columns."
        )
    there = [str(column) for column in names]
    columns = columns or {name: name for name in there}
    asked = [name for names in columns.values() for name in ([names] if isinstance(names, str) else names)]
    missing = [name for name in asked if name not in there]
    if missing:
        raise UserError(f"the table has no column {missing[0]!r}; its columns are {', '.join(there)}.")

    def array(names: str | Sequence[str]) -> np.ndarray:
        if isinstance(names, str):
            return _column(frame, names)
        return np.stack([_column(frame, name) for name in names], axis=-1)

    return {name: array(names) for name, names in columns.items()}


def _column(frame: Any, name: str) -> np.ndarray:
    """One column; cells that are arrays or lists are stacked."""
    found = frame[name].to_numpy() if hasattr(frame[name], "to_numpy") else as_array(frame[name], f"column {name!r}")
    if found.dtype == object and len(found) and np.ndim(found[0]):
        cells = [as_array(cell, f"a cell of column {name!r}") for cell in found]
        shapes = {cell.shape for cell in cells}
        if len(shapes) > 1:
            raise UserError(f"the cells of column {name!r} have the shapes {sorted(shapes)}; all need the same.")
        return np.stack(cells)
    return as_array(found, f"column {name!r}")


def _check_random_access(dataset: Any) -> None:
    if dataset is None:
        return
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UserError(
            f"a {type(dataset).__name__} has no `len` or no `[i]`: it cannot be read at random. Give what can only be "
            "iterated to spmdkit.data.from_batches or from_examples."
        )
    if not len(dataset):
        raise UserError(f"the {type(dataset).__name__} holds no examples; give some, or no evaluation split.")


def _check_stackable(examples: Sequence[Mapping[str, np.ndarray]], rows: Sequence[int]) -> None:
    """Raises where examples differ in form."""
    forms = [{name: (str(value.dtype), value.shape) for name, value in example.items()} for example in examples]
    for row, form in zip(rows, forms, strict=True):
        if form != forms[0]:
            raise UserError(
                f"example {rows[0]} has {forms[0]}, but example {row} has {form}; all need the same names, dtypes and "
                "shapes. Pad them, with weights of 0."
            )


def _same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(np.array_equal(one[name], other[name], equal_nan=one[name].dtype.kind in "fc") for name in one)


def _looked_at(sources: Sequence[DatasetSource]) -> tuple[Any, ...]:
    """What a fingerprint is made of: some examples of every split, and the splits' sizes."""
    arrays = []
    for source in sources:
        for index in np.unique(np.linspace(0, len(source) - 1, LOOKED_AT).astype(int)):
            arrays += [array for _, array in sorted(source[int(index)].items())]
    return arrays, [len(source) for source in sources], sorted(sources[0][0])
