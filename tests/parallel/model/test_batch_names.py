"""Which array of a batch is meant by a name that it does not hold."""

import pytest
from spmdkit.parallel.model.batch_names import meant, of_missing_key

BATCH = ("inputs", "targets", "weights", "example")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        *[(word, "targets") for word in ("labels", "label", "y", "Labels", "target", "y_true")],
        *[(word, "inputs") for word in ("x", "input", "image", "tokens", "input_ids")],
        *[(word, "weights") for word in ("mask", "weight", "sample_weight")],
        ("index", "example"),
        ("zebra", ""),
        (3, ""),
    ],
)
def test_other_words_and_near_ones(name, array):
    assert meant(name, BATCH) == array


def test_a_word_means_only_what_is_there():
    assert meant("labels", ("inputs", "label")) == "label"
    assert meant("labels", ("image",)) == ""
    assert meant("kernal", BATCH, ["kernel", "bias"]) == "kernel"


def test_what_is_said_of_a_missing_key():
    said = of_missing_key(KeyError("labels"), BATCH)
    assert said == "The batch holds inputs, targets, weights, example, and no 'labels'. Did you mean 'targets'?"
    assert of_missing_key(KeyError("zebra"), BATCH).endswith("and no 'zebra'.")
    assert of_missing_key(KeyError("inputs"), BATCH) == "", "of another mapping"
    assert of_missing_key(KeyError(3), BATCH) == of_missing_key(KeyError(), BATCH) == ""
