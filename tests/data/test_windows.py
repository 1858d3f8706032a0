"""Windows tile streams: every token but a stream's first is a target once, and nothing is copied before it is read."""

import numpy as np
import pytest
from spmdkit.data.source import BadDataError
from spmdkit.data.sources.texts.documents import Stream
from spmdkit.data.windows import WindowSource


def source(*sizes, length=4, vocabulary=None):
    streams = [Stream(f"s{i}", np.arange(size, dtype=np.uint16) + 1000 * i) for i, size in enumerate(sizes)]
    return WindowSource(streams, length, vocabulary)


@pytest.mark.parametrize(("size", "windows"), [(0, 0), (4, 0), (5, 1), (8, 1), (9, 2), (101, 25)])
def test_number_of_windows(size, windows):
    assert len(source(size)) == windows


def test_an_example():
    example = source(9)[1]
    assert example["inputs"].tolist() == [4, 5, 6, 7]
    assert example["targets"].tolist() == [5, 6, 7, 8]
    assert {name: (str(value.dtype), value.shape) for name, value in example.items()} == {
        "inputs": ("int32", (4,)),
        "targets": ("int32", (4,)),
        "weights": ("float32", (4,)),
    }


def test_every_token_is_a_target_once():
    windows = source(41)
    assert np.concatenate([windows[i]["targets"] for i in range(len(windows))]).tolist() == list(range(1, 41))


def test_windows_never_span_streams():
    windows = source(9, 3, 6)  # 2, 0 and 1 windows
    batch = windows.take(np.arange(3))
    assert batch["inputs"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [2000, 2001, 2002, 2003]]
    assert batch["targets"][2].tolist() == [2001, 2002, 2003, 2004]


def test_take_is_the_stack_of_examples():
    windows = source(90, 5, 33)
    indices = np.array([25, 3, 21, 3, 22])
    batch = windows.take(indices)
    for name, rows in batch.items():
        assert np.array_equal(rows, np.stack([windows[int(i)][name] for i in indices]))
        assert rows.flags.c_contiguous


@pytest.mark.parametrize("index", [-1, 2])
def test_no_example_outside(index):
    with pytest.raises(IndexError, match=f"example {index} of 2"):
        source(9)[index]


def test_streams_are_not_copied():
    ids = np.arange(1000, dtype=np.uint8)
    windows = WindowSource([Stream("s", ids)], 10)
    ids[:] = 7
    assert set(windows[3]["inputs"].tolist()) == {7}


def test_an_id_outside_the_vocabulary_is_loud():
    windows = source(90, 33, vocabulary=1000)
    windows.take(np.arange(22))
    with pytest.raises(BadDataError, match=r"s1 holds token id 1004; data\.vocabulary=1000 allows 0 \.\. 999"):
        windows.take(np.array([0, 22]))


@pytest.mark.parametrize(("dtype", "value"), [(np.int64, -1), (np.int64, 2**32 + 1), (np.uint32, 2**31 + 1)])
def test_ids_that_do_not_fit_int32_are_loud(dtype, value):
    ids = np.ones(10, dtype)
    ids[3] = value
    with pytest.raises(BadDataError, match=f"token id {value};"):
        WindowSource([Stream("s", ids)], 4, vocabulary=2**31 - 1)[0]


def test_bad_data_has_its_own_exit_code():
    assert BadDataError.exit_code == 3
