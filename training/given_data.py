"""Data as one has it in Python: arrays by name, a pair of arrays, a source, splits, or batches one after the other."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..data.source import Source, Splits
from ..data.sources.arrays import ArraySource
from ..data.sources.datasets import NAMES
from ..data.sources.streams import from_batches
from ..data.sources.values import as_arrays
from ..mesh.errors import UserError


def rows_to_train_on(data: Any) -> Source:
    """The rows of some data by their number.

    Args:
        data: `Splits`, of which the training split is taken; a mapping of arrays or tensors with rows on dim 0, nested
            or not, or a tuple (inputs, targets) of them; a `Source`; or a list, an iterable or an iterator of batches,
            or a function of the epoch that gives one.

    Raises:
        UserError: It is none of these, or its arrays do not fit together.
    """
    if isinstance(data, Splits):
        return data.train
    if isinstance(data, Mapping | tuple):
        return ArraySource(as_arrays(data, NAMES))
    return from_batches(data).train if _gives_batches(data) else data


def rows_in_order(data: Any) -> Iterator[Source]:
    """Sources whose rows, one after the other, are all rows of some data; of batches one source each.

    Args:
        data: As `rows_to_train_on` takes it; of `Splits` the evaluation split is taken.

    Raises:
        UserError: It is none of these, or there is no evaluation split.
    """
    if isinstance(data, Splits):
        if data.evaluation is None:
            raise UserError("These splits have no evaluation split. Give splits.train, or other data.")
        yield data.evaluation
    elif isinstance(data, Mapping | tuple):
        yield ArraySource(as_arrays(data, NAMES))
    elif _gives_batches(data):
        batches: Any = data(0) if callable(data) else data
        for batch in batches:
            yield ArraySource(as_arrays(batch, NAMES))
    else:
        yield data


def _gives_batches(data: Any) -> bool:
    """Whether it is read batch by batch, from its beginning.

    Raises:
        UserError: It is no data.
    """
    if not isinstance(data, list) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if _first_is_mapping(data):
            return False
        raise UserError(
            f"A {type(data).__name__} alone is no data: nothing says what its values are. Give arrays by name, such as "
            '{"inputs": x, "targets": y}, or a tuple (inputs, targets).'
        )
    if hasattr(data, "__iter__") or callable(data):
        return True
    raise UserError(
        f"A {type(data).__name__} is no data. Give arrays by name, a tuple (inputs, targets), a source, or batches."
    )


def _first_is_mapping(data: Any) -> bool:
    """Whether the first row holds arrays by name; not so where there is none, or [] takes names, as of a table."""
    try:
        return isinstance(data[0], Mapping)
    except (LookupError, TypeError):
        return False
