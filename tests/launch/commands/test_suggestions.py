"""`--steps 3` where `train.steps=3` is meant."""

import pytest
from spmdkit.launch.commands.suggestions import explain_unknown, is_override

STEPS = "--steps is not an option; set values of the config as key=value: train.steps=..."


@pytest.mark.parametrize(
    ("unknown", "options", "reads_config", "message"),
    [
        (["--steps"], [], True, STEPS),
        (["--steps=3"], ["--fresh"], True, STEPS),
        (["--every"], [], True, "--every is not an option; set values of the config as key=value: eval.every=... or "),
        (["--steps", "stray"], [], True, f"{STEPS}\n  unrecognized arguments: stray"),
        (["--zzzzqqq"], [], True, "unrecognized arguments: --zzzzqqq"),
        (["--stpe=4"], ["--step", "--json"], True, "--stpe is not an option; did you mean --step?"),
        (["--steps", "x"], [], False, "unrecognized arguments: --steps x"),
    ],
)
def test_explains_unknown_arguments(unknown, options, reads_config, message):
    assert explain_unknown(unknown, options, reads_config).startswith(message)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.steps=3", True),
        ("strategy={fsdp: 2}", True),
        ("train.stps=3", True),
        ("train.steps", False),
        ("x=3", False),
        ("def main(train=3)", False),
    ],
)
def test_is_override(word, expected):
    assert is_override(word) == expected
