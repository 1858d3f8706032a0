"""What can only be read from its beginning, as splits: loaders and iterators of other libraries."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...layouts.sizes import format_bytes
from ...mesh.errors import UserError
from ..ranges import check_vocabulary
from ..source import Splits, fingerprint
from .arrays import ArraySource
from .datasets import NAMES
from .stream_source import StreamSource

MOST_HELD_OUT = 1 << 30
"""Bytes of held-out examples, which are read into memory."""


def from_batches(
    train: Any, evaluation: Any = None, *, names: Sequence[str] = NAMES, vocabulary: int | None = None
) -> Splits:
    """Makes splits of batches that come one after the other, such as those of a PyTorch `DataLoader`.

    The runtime makes batches of its own of their rows: batches may be of any size, and of different ones.

    Args:
        train: Something that is iterated once an epoch; or a function that is told the number of the epoch, from 0, and
            gives what is iterated in it. An item is a mapping, nested or not, or a tuple, of arrays or tensors with
            rows on dim 0. "weights" of 1 are added if absent. Every process has to be given the same rows in the same
            order: seed whatever shuffles.
        evaluation: The same for held-out examples; it ends, and is read into memory once.
        names: What the entries of a tuple are.
        vocabulary: Number of token ids, where examples hold tokens.

    Returns:
        The splits. A resume reads and drops the rows before it. Their fingerprint is that of the first batch, so
        processes whose first batches differ are told before the first step, and so is a resume.

    Raises:
        UserError: there are no rows, or they are of no such form; or over 1 GiB of held-out examples.
    """
    return _from_stream(train, evaluation, names, vocabulary, batched=True)


def from_examples(
    train: Any, evaluation: Any = None, *, names: Sequence[str] = NAMES, vocabulary: int | None = None
) -> Splits:
    """Makes splits of examples that come one after the other, such as those of a generator: see `from_batches`.

    Args:
        train: As in `from_batches`, but an item is one example.
        evaluation: The same for held-out examples; it ends, and is read into memory once.
        names: What the entries of a tuple are.
        vocabulary: Number of token ids, where examples hold tokens.

    Returns:
        The splits, as those of `from_batches`.

    Raises:
        UserError: As `from_batches`.
    """
    return _from_stream(train, evaluation, names, vocabulary, batched=False)


def _from_stream(train: Any, evaluation: Any, names: Sequence[str], vocabulary: int | None, *, batched: bool) -> Splits:
    """As `from_batches` and `from_examples`."""
    check_vocabulary(vocabulary)
    source = _stream(train, names, batched)
    first = source[0]
    held_out = None if evaluation is None else _held_out(_stream(evaluation, names, batched))
    if held_out is not None and held_out[0].keys() != first.keys():
        told = [", ".join(sorted(rows)) for rows in (first, held_out[0])]
        raise UserError(f"training rows have {told[0]}, evaluation rows {told[1]}; give the same.")
    kind = "batches" if batched else "examples"
    known = fingerprint([array for _, array in sorted(source.first_rows().items())], sorted(first), kind)
    return Splits(
        train=source,
        evaluation=held_out,
        vocabulary=vocabulary,
        description=f"{source.what}" + (f", {len(held_out):,} evaluation examples" if held_out is not None else ""),
        fingerprint=known,
    )


def _held_out(stream: StreamSource) -> ArraySource:
    """The rows of one epoch, in memory."""
    parts, size = [], 0
    for rows in stream.rows_of_one_epoch():
        parts.append(rows)
        size += sum(array.nbytes for array in rows.values())
        if size > MOST_HELD_OUT:
            raise UserError(
                f"the {stream.what} for evaluation holds more than {format_bytes(MOST_HELD_OUT)}, and is read into "
                "memory. Give fewer rows, or a dataset with random access (Splits._replace(evaluation=...))."
            )
    if not parts:
        raise UserError(f"the {stream.what} for evaluation gave no rows. Give some, or evaluation=None.")
    return ArraySource({name: np.concatenate([rows[name] for rows in parts]) for name in parts[0]})


def _stream(given: Any, names: Sequence[str], batched: bool) -> StreamSource:
    """The rows of an iterable, an iterator, or a function of the epoch."""
    kind = "batches" if batched else "examples"
    if hasattr(given, "__iter__") or hasattr(given, "__next__"):
        what = f"stream of {kind} of a {type(given).__name__}"
        once = hasattr(given, "__next__")
        return StreamSource(lambda epoch: given, batched=batched, names=names, once=once, what=what)
    if callable(given):
        what = f"stream of {kind} of {getattr(given, '__name__', type(given).__name__)}"
        make: Any = given
        return StreamSource(make, batched=batched, names=names, once=False, what=what)
    raise UserError(
        f"a {type(given).__name__} cannot be iterated; give a loader, an iterator, or a function of the number of the "
        "epoch that makes one."
    )
