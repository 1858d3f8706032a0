"""Examples taken together, and fingerprints: what they notice, of data read whole and of samples."""

import numpy as np
import pytest
from spmdkit.data import source as source_file
from spmdkit.data.source import BatchedSource, fingerprint, take
from spmdkit.mesh.errors import UserError

ROWS = [{"inputs": np.array([n, n + 1]), "weights": np.float32(n)} for n in range(5)]


def test_take_stacks_examples_in_order():
    found = take(ROWS, np.array([3, 0, 3]))
    assert found["inputs"].tolist() == [[3, 4], [0, 1], [3, 4]]
    assert found["weights"].tolist() == [3.0, 0.0, 3.0]
    assert found["weights"].dtype == np.float32
    assert take(ROWS, np.array([2]))["inputs"].tolist() == [[2, 3]]


class Reader(BatchedSource):
    """A user's reader that answers every question in the same way."""

    def __init__(self, answer):
        self.answer = answer

    def __len__(self):
        return 8

    def take(self, indices):
        return self.answer(indices)


def stops(indices):
    return next(iter(()))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda indices: {"inputs": indices[:-3]}, r"Reader \(.*\)\.take was asked for 5 rows, and returned 2 rows of"),
        (lambda indices: {"inputs": np.arange(6)}, r"was asked for 5 rows, and returned 6 rows of inputs"),
        (lambda indices: {"a": indices, "b": np.float32(1)}, r"asked for 5 rows, and returned no dim of rows of b"),
        (lambda indices: [indices], r"take returned a list; it must return a dict of arrays by name"),
        (stops, r"reading examples of .*Reader .* fails in .*test_source\.py, line \d+ \(return next.*StopIteration"),
    ],
)
def test_rejects_readers_that_return_something_else_than_the_rows(answer, message):
    with pytest.raises(UserError, match=message):
        take(Reader(answer), np.arange(5))


def test_rejects_single_examples_of_different_shapes():
    rows = [{"inputs": np.zeros(3 + (number == 2))} for number in range(4)]
    with pytest.raises(UserError, match=r"list .*: example 1 has the shapes .*\(3,\).*, but example 2 has .*\(4,\)"):
        take(rows, np.array([1, 0, 2]))


A = np.arange(12, dtype=np.int32)
OTHERS = {
    "a value": (np.where(np.arange(12) == 7, 0, A),),
    "its shape": (A.reshape(3, 4),),
    "its dtype": (A.view(np.uint32),),
    "one more": (A, A[:0]),
    "a fact": (A, "length 8"),
}


@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS)
def test_fingerprint_changes_with_arrays_and_facts(changed):
    arrays, facts = (
        [each for each in changed if isinstance(each, np.ndarray)],
        [*filter(lambda x: type(x) is str, changed)],
    )
    assert fingerprint(arrays, *facts) != fingerprint([A])
    assert len(fingerprint([A])) == 16


def test_fingerprint_ignores_the_memory_layout():
    wide = np.arange(24, dtype=np.int32)
    assert fingerprint([wide[::2] // 2]) == fingerprint([A]) == fingerprint([np.array(A, order="F")])
    assert fingerprint([np.array(3)]) != fingerprint([np.array(4)])


def test_fingerprint_covers_every_block(monkeypatch):
    array = np.arange(5000, dtype=np.int32).reshape(500, 10)[:, ::2]
    whole = fingerprint([array])
    monkeypatch.setattr(source_file, "BLOCK_BYTES", 1)
    assert fingerprint([array]) == whole


def test_fingerprint_samples_large_data(monkeypatch, tmp_path):
    """16 blocks of 64 bytes of 64 KiB: ends and whatever changes much are noticed, and not every byte is read."""
    for name, value in {"WHOLE_BYTES": 1024, "SAMPLED_BLOCKS": 16, "BLOCK_BYTES": 64, "END_BYTES": 32}.items():
        monkeypatch.setattr(source_file, name, value)
    path = tmp_path / "large.bin"
    np.arange(1 << 16, dtype=np.uint16).astype(np.uint8).tofile(path)
    mapped = np.memmap(path, np.uint8, "r+")
    small = np.zeros(100, np.uint8)
    first = fingerprint([mapped, small])

    def after(place, value=99):
        before, mapped[place] = np.array(mapped[place]), value
        try:
            return fingerprint([mapped, small])
        finally:
            mapped[place] = before

    assert after(0) != first != after(-1)
    assert after(slice(20_000, 40_000)) != first
    assert after(100) == first, "between the blocks"
    assert fingerprint([mapped[:-1], small]) != first
    small[-1] = 1
    assert fingerprint([mapped, small]) != first
