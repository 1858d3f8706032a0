"""Splits by hash: stable, near the fraction, never overlapping; streams keep memory maps apart."""

import numpy as np
import pytest
from spmdkit.data.sources.texts.documents import Document, hash_fraction, join, split_documents
from spmdkit.data.sources.texts.text import SEPARATOR
from spmdkit.data.sources.texts.tokens import NO_SEPARATOR


def documents(count, size=10):
    return [Document(f"{i}.txt".encode(), np.full(size, i % 250 + 1, np.uint8), f"{i}.txt") for i in range(count)]


def test_the_hash_never_changes():
    assert hash_fraction(b"os.py") == 0.24913519448671906
    assert hash_fraction(b"") == 0.8666040914613156


def test_hashes_are_uniform():
    values = [hash_fraction(b"%d" % i) for i in range(4000)]
    assert np.histogram(values, 10, (0, 1))[0] == pytest.approx(400, rel=0.2)


def test_the_split_does_not_depend_on_the_order_or_on_other_documents():
    train, evaluation = split_documents(documents(400), 0.1)
    assert {d.key for d in train} | {d.key for d in evaluation} == {d.key for d in documents(400)}
    assert len(evaluation) == pytest.approx(40, abs=15)
    again = split_documents(documents(400)[::-1], 0.1)
    assert {d.key for d in again[1]} == {d.key for d in evaluation}
    fewer = split_documents(documents(400)[:300], 0.1)
    assert {d.key for d in fewer[1]} == {d.key for d in evaluation} & {d.key for d in documents(300)}


def test_a_few_documents_are_split_at_their_ends():
    train, evaluation = split_documents(documents(3, size=100), 0.1)
    assert [len(d.ids) for d in train] == [90] * 3
    assert [len(d.ids) for d in evaluation] == [10] * 3
    assert np.shares_memory(train[0].ids, train[0].ids.base)


def test_no_fraction_holds_nothing_out():
    train, evaluation = split_documents(documents(400), 0.0)
    assert (len(train), len(evaluation)) == (400, 0)


def test_small_documents_become_one_stream_with_separators():
    (stream,) = join([*documents(2, size=3), Document(b"", np.zeros(0, np.uint8), "empty")], SEPARATOR)
    assert stream.ids.tolist() == [1, 1, 1, 0, 2, 2, 2, 0]
    (tokens,) = join(documents(2, size=3), NO_SEPARATOR)
    assert tokens.ids.tolist() == [1, 1, 1, 2, 2, 2]


def test_mapped_documents_stay_alone_and_are_not_copied():
    mapped = Document(b"big", np.arange(9, dtype=np.uint8), "big.txt", mapped=True)
    streams = join([mapped, *documents(1, size=2)], SEPARATOR)
    assert [stream.name for stream in streams] == ["documents", "big.txt"]
    assert streams[1].ids is mapped.ids


def test_nothing_joins_to_nothing():
    assert join([], SEPARATOR) == []
