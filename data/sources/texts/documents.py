"""Documents, the held-out share of them, and the streams of token ids they are joined into.

A split must not depend on the machine, on the order of files, or on the number of processes: a document is held out
when the hash of its key (its name, or its content) falls below the fraction. Where that would hold out fewer than
`FEWEST_HELD_OUT` documents, as with one big file, the end of every document is held out instead.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FEWEST_HELD_OUT = 5


class Document(NamedTuple):
    """Token ids that belong together.

    Attributes:
        key: Decides on which side of the split the document falls.
        ids: Unsigned integers, (tokens,).
        name: For messages.
        mapped: Memory-mapped: stays a stream of its own and is never copied whole.
    """

    key: bytes
    ids: np.ndarray
    name: str
    mapped: bool = False


class Corpus(NamedTuple):
    """What a reader found.

    Attributes:
        documents: In an order that does not depend on the machine.
        separator: Ids put after each document that is joined with others: one or none.
        vocabulary: Number of token ids where the reader knows it (256 for bytes), else None.
        description: What was read, for people.
    """

    documents: Sequence[Document]
    separator: np.ndarray
    vocabulary: int | None
    description: str


class Stream(NamedTuple):
    """A run of token ids that examples are cut from."""

    name: str
    ids: np.ndarray


def hash_fraction(key: bytes) -> float:
    """A number in [0, 1) that depends on the key alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") / 2**48


def split_documents(documents: Sequence[Document], eval_fraction: float) -> tuple[list[Document], list[Document]]:
    """Divides documents into (training, evaluation).

    Args:
        documents: All documents.
        eval_fraction: Share to hold out, in [0, 1).

    Returns:
        Training documents and evaluation documents, each in the order given.
    """
    held_out = [hash_fraction(document.key) < eval_fraction for document in documents]
    if eval_fraction > 0 and sum(held_out) < FEWEST_HELD_OUT:
        cuts = [len(document.ids) - round(len(document.ids) * eval_fraction) for document in documents]
        heads = [document._replace(ids=document.ids[:cut]) for document, cut in zip(documents, cuts, strict=True)]
        tails = [document._replace(ids=document.ids[cut:]) for document, cut in zip(documents, cuts, strict=True)]
        return heads, tails
    train = [document for document, out in zip(documents, held_out, strict=True) if not out]
    evaluation = [document for document, out in zip(documents, held_out, strict=True) if out]
    return train, evaluation


def join(documents: Sequence[Document], separator: np.ndarray) -> list[Stream]:
    """Joins documents into as few streams as possible: memory-mapped ones stay alone, the others become one.

    Args:
        documents: In the order in which they are joined; empty ones are left out.
        separator: Ids (0 or 1 of them) put after each joined document.

    Returns:
        The joined stream first, where there is one, then the memory-mapped documents.
    """
    documents = [document for document in documents if len(document.ids)]
    small = [part for document in documents if not document.mapped for part in (document.ids, separator)]
    joined = [Stream("documents", np.concatenate(small))] if small else []
    return joined + [Stream(document.name, document.ids) for document in documents if document.mapped]
