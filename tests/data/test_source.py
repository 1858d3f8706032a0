"""Examples taken together, and fingerprints: what they notice, of data read whole and of samples."""

import numpy as np
import pytest
from spmdkit.data import source as source_file
from spmdkit.data.source import BadDataError, fingerprint, take

ROWS = [{"inputs": np.array([n, n + 1]), "weights": np.float32(n)} for n in range(5)]


class Asked:
    """A source with a `take` of its own."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        raise AssertionError("it reads many at once")

    def take(self, indices):
        return {"indices": np.asarray(indices) * 10}


def test_examples_are_stacked_in_the_order_asked():
    found = take(ROWS, np.array([3, 0, 3]))
    assert found["inputs"].tolist() == [[3, 4], [0, 1], [3, 4]]
    assert found["weights"].tolist() == [3.0, 0.0, 3.0]
    assert found["weights"].dtype == np.float32


def test_a_source_that_reads_many_at_once_is_asked_once():
    assert take(Asked(), np.array([2, 1]))["indices"].tolist() == [20, 10]


def test_bad_data_is_not_tried_again():
    assert BadDataError("wrong").exit_code == 3


A = np.arange(12, dtype=np.int32)
OTHERS = {
    "a value": (np.where(np.arange(12) == 7, 0, A),),
    "its shape": (A.reshape(3, 4),),
    "its dtype": (A.view(np.uint32),),
    "one more": (A, A[:0]),
    "a fact": (A, "length 8"),
}


@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS)
def test_a_fingerprint_notices(changed):
    arrays, facts = (
        [each for each in changed if isinstance(each, np.ndarray)],
        [*filter(lambda x: type(x) is str, changed)],
    )
    assert fingerprint(arrays, *facts) != fingerprint([A])
    assert len(fingerprint([A])) == 16


def test_a_fingerprint_is_of_what_is_held_and_not_of_how():
    wide = np.arange(24, dtype=np.int32)
    assert fingerprint([wide[::2] // 2]) == fingerprint([A]) == fingerprint([np.array(A, order="F")])
    assert fingerprint([np.array(3)]) != fingerprint([np.array(4)])


def test_of_large_data_samples_are_read(monkeypatch, tmp_path):
    """16 blocks of 64 bytes of 64 KiB: ends and whatever changes much are noticed, and not every byte is read."""
    for name, value in {"WHOLE_BYTES": 1024, "SAMPLED_BLOCKS": 16, "BLOCK_BYTES": 64, "END_BYTES": 32}.items():
        monkeypatch.setattr(source_file, name, value)
    path = tmp_path / "large.bin"
    np.arange(1 << 16, dtype=np.uint16).astype(np.uint8).tofile(path)
    mapped = np.memmap(path, np.uint8, "r+")
    first = fingerprint([mapped])

    def after(place, value=99):
        before, mapped[place] = np.array(mapped[place]), value
        try:
            return fingerprint([mapped])
        finally:
            mapped[place] = before

    assert after(0) != first != after(-1)
    assert after(slice(20_000, 40_000)) != first
    assert after(100) == first, "between the blocks"
    assert fingerprint([mapped[:-1]]) != first
