"""Examples taken together, and fingerprints: what they notice, of data read whole and of samples."""

import numpy as np
import pytest
from spmdkit.data import source as source_file
from spmdkit.data.source import fingerprint, take

ROWS = [{"inputs": np.array([n, n + 1]), "weights": np.float32(n)} for n in range(5)]


def test_take_stacks_examples_in_order():
    found = take(ROWS, np.array([3, 0, 3]))
    assert found["inputs"].tolist() == [[3, 4], [0, 1], [3, 4]]
    assert found["weights"].tolist() == [3.0, 0.0, 3.0]
    assert found["weights"].dtype == np.float32
    assert take(ROWS, np.array([2]))["inputs"].tolist() == [[2, 3]]


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
