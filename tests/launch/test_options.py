"""`--steps 3` where `train.steps=3` is meant."""

from spmdkit.launch.options import explain_unknown


def said(*words, unknown=None):
    return explain_unknown(words if unknown is None else unknown, words)


def test_an_option_that_is_a_key():
    start = "--steps is not an option; values of the config are given as key=value: "
    assert said("--steps", "3") == f"{start}train.steps=3"
    assert said("--steps=3") == f"{start}train.steps=3"
    assert said("--steps") == f"{start}train.steps=..."


def test_its_value_is_no_other_argument():
    assert said("--steps", "train.remat=full", unknown=["--steps"]).endswith("train.steps=...")
    assert "train.steps=..." in said("--steps", "--fresh", unknown=["--steps"])


def test_a_value_with_spaces_is_quoted():
    assert said("--prompt", "def main").endswith("'sample.prompt=def main'")


def test_what_is_no_key_is_unrecognized():
    assert said("--zzzzqqq", "7") == "unrecognized arguments: --zzzzqqq 7"
    assert said("--steps", "3", "stray").splitlines()[-1] == "  unrecognized arguments: stray"
