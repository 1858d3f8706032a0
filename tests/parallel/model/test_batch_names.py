"""Which array of a batch is meant by a name that it does not hold."""

import pytest
from spmdkit.parallel.model.batch_names import explain_key_error, guess_name

BATCH = ("inputs", "targets", "weights", "example")


@pytest.mark.parametrize(
    ("names", "array"),
    [
        (("labels", "label", "y", "Labels", "target", "y_true"), "targets"),
        (("x", "input", "image", "tokens", "input_ids"), "inputs"),
        (("mask", "weight", "sample_weight"), "weights"),
        (("index",), "example"),
        (("zebra", 3), ""),
    ],
)
def test_guesses_synonyms_and_similar_names(names, array):
    assert {guess_name(name, BATCH) for name in names} == {array}


def test_guesses_only_names_in_the_batch():
    assert guess_name("labels", ("inputs", "label")) == "label"
    assert guess_name("labels", ("image",)) == ""
    assert guess_name("kernal", BATCH, ["kernel", "bias"]) == "kernel"


def test_explains_missing_keys():
    found = "The batch does not contain 'labels', only inputs, targets, weights, example. Did you mean 'targets'?"
    assert explain_key_error(KeyError("labels"), BATCH) == found
    assert explain_key_error(KeyError("inputs"), BATCH) == "", "of another mapping"
    assert explain_key_error(KeyError(3), BATCH) == explain_key_error(KeyError(), BATCH) == ""
