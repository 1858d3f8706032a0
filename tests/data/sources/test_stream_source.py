"""Rows of a stream by their number: forward, back where that is possible, and what cannot be read says so."""

import numpy as np
import pytest
from loaders import ROWS, Loader
from spmdkit.data import from_batches
from spmdkit.data.sources.stream_source import HEAD_ROWS


def test_what_is_read_once_ends_with_the_reason():
    def batches(number):
        yield from Loader(number, seed=0)

    with pytest.raises(
        ValueError, match=r"a generator ended after 20 rows, and can be read only once; the run needs more"
    ):
        from_batches(batches(20)).train.take(np.arange(16, 24))
    long = from_batches(batches(4 * HEAD_ROWS)).train
    long.take(np.array([3 * HEAD_ROWS]))
    assert long.take(np.array([5, 0]))["targets"].shape == (2,)  # the first rows are kept
    with pytest.raises(ValueError, match=r"has been read up to row 3,076 and cannot go back to row 1,500"):
        long.take(np.array([1500]))


def test_going_back_begins_again_where_that_is_possible():
    stream = from_batches(lambda number: Loader(4 * HEAD_ROWS, seed=number)).train
    far = stream.take(np.array([3 * HEAD_ROWS, 1500]))["targets"]
    assert stream.take(np.array([1500, 3 * HEAD_ROWS]))["targets"].tolist() == far[::-1].tolist()


def test_rows_keep_their_names_and_weights():
    items = [{"image": np.ones((2, 3)), "targets": {"a": [1, 2]}, "weights": np.array([1, 0], np.float32)}]
    train = from_batches(items).train
    assert set(train[1]) == {"image", "targets/a", "weights"}
    assert (train[1]["weights"], train[2]["weights"]) == (0, 1)  # row 2 is the first of the second epoch
    assert train.origin(1) == "row 1 of the stream of batches of a list"


@pytest.mark.parametrize(
    ("items", "read", "message"),
    [
        ([], 0, "the stream of batches of a list gave no rows in its epoch 0"),
        (
            [(np.ones((2, 2)), 1)],
            0,
            r"has the rows {'inputs': 2, 'targets': 'no dim'.*Give single examples to from_examples",
        ),
        ([(np.ones(2), np.ones(2)), (np.ones((2, 2)), np.ones(2))], 2, "are .* at first and .* from row 2 on"),
        ([(np.ones(2), ["a", "b"])], 0, "targets holds <U1"),
    ],
)
def test_items_that_cannot_be(items, read, message):
    with pytest.raises(ValueError, match=message):
        from_batches(items).train[read]


def test_an_error_of_the_maker_is_told_with_its_place():
    def broken(number):
        yield from Loader(seed=number)
        raise KeyError("a shard is missing")

    stream = from_batches(broken).train
    with pytest.raises(
        ValueError, match=r"reading the stream of batches of broken fails in .*test_stream_source\.py, line \d+"
    ):
        stream.take(np.array([ROWS]))
