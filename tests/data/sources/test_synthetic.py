"""Noisy digits: the same for the same seed, every class at every place, and what a picture shows is its class."""

import numpy as np
import pytest
from spmdkit.data import DataConfig, open_splits
from spmdkit.data.source import take
from spmdkit.data.sources.synthetic import CLASSES, FEATURES, GLYPHS, HEIGHT, WIDTH, synthetic_digits

ROWS = 600


def digits(**options):
    splits = synthetic_digits(0.25, rows=ROWS, **options)
    return splits, take(splits.train, np.arange(len(splits.train)))


def test_sizes_and_types():
    splits, train = digits()
    assert len(splits.train) + len(splits.evaluation) == ROWS
    assert abs(len(splits.evaluation) - ROWS / 4) < 30  # which rows are held out is drawn row by row
    assert train["inputs"].shape == (len(splits.train), FEATURES)
    assert (train["inputs"].dtype, train["targets"].dtype) == (np.float32, np.int32)
    assert set(train["targets"].tolist()) == set(range(CLASSES))
    assert splits.description.startswith("synthetic: 600 noisy images of digits, 64 features, 10 classes")


def test_seeds():
    assert digits()[0].fingerprint == digits()[0].fingerprint != digits(seed=1)[0].fingerprint


def test_a_picture_shows_its_class():
    """Without noise each row is, at one of 2 x 4 places, the glyph of its target."""
    _, train = digits(noise=0.0)
    tops, lefts = set(), set()
    for pixels, target in zip(train["inputs"].reshape(-1, HEIGHT, WIDTH), train["targets"], strict=True):
        rows, columns = (np.flatnonzero(pixels.any(axis=axis)) for axis in (1, 0))
        strokes = [int("".join(str(int(pixel)) for pixel in row), 2) for row in pixels[rows[0] : rows[0] + 7]]
        shift = next(left for left in range(4) if [glyph << (3 - left) for glyph in GLYPHS[target]] == strokes)
        tops.add(int(rows[0]))
        lefts.add(shift)
        assert columns[0] >= shift
    assert (tops, lefts) == ({0, 1}, {0, 1, 2, 3})


def test_noise_has_the_deviation_asked_for():
    still, noisy = digits(noise=0.0)[1]["inputs"], digits(noise=0.4)[1]["inputs"]
    assert abs((noisy - still).std() - 0.4) < 0.01


def test_tokens_are_a_function_of_the_row():
    config = DataConfig(source="synthetic_tokens", length=16, vocabulary=50, eval_fraction=0.25)
    splits, again = open_splits(config), open_splits(config)
    assert (len(splits.train), len(splits.evaluation), splits.vocabulary) == (6144, 2048, 50)
    rows = [*(splits.train[index] for index in (6143, 0, 1)), splits.evaluation[0]]
    assert len({row["inputs"].tobytes() for row in rows}) == 4
    np.testing.assert_equal(rows, [*(again.train[index] for index in (6143, 0, 1)), again.evaluation[0]])
    for row in rows:
        assert {name: (array.shape, array.dtype.name) for name, array in row.items()} == {
            "inputs": ((16,), "int32"),
            "targets": ((16,), "int32"),
            "weights": ((16,), "float32"),
        }
        assert set(((row["targets"] - row["inputs"]) % 50).tolist()) <= {1, 2, 3}
        np.testing.assert_array_equal(row["inputs"][1:], row["targets"][:-1])
        assert 0 <= row["inputs"].min() <= row["targets"].max() < 50
    with pytest.raises(IndexError, match="example 6144 of 6144"):
        splits.train[6144]


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5])
def test_tokens_have_a_row_for_each_row_of_a_batch(fraction):
    config = DataConfig(source="synthetic_tokens", eval_fraction=fraction)
    default, large = open_splits(config), open_splits(config, batch=20_000)
    assert len(large.train) >= 20_000
    assert bool(large.evaluation) == bool(fraction)
    np.testing.assert_equal(large.train[0], default.train[0])
    fitting = open_splits(config, batch=len(default.train))
    assert (fitting.fingerprint, len(fitting.train)) == (default.fingerprint, len(default.train))


def test_tokens_have_a_default_vocabulary_and_may_go_without_evaluation():
    splits = open_splits(DataConfig(source="synthetic_tokens", eval_fraction=0))
    assert (splits.vocabulary, splits.evaluation) == (256, None)
    other = open_splits(DataConfig(source="synthetic_tokens", eval_fraction=0, vocabulary=8))
    assert splits.fingerprint != other.fingerprint
    assert "8,192 rows of 256 random tokens, vocabulary 8" in other.description
