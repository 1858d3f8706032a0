"""`--steps 3` where `train.steps=3` is meant."""

import pytest
from spmdkit.launch.commands.suggestions import explain_unknown, is_override, reject_overrides


def said(*words, unknown=None):
    return explain_unknown(words if unknown is None else unknown, words)


def test_option_that_is_a_key():
    start = "--steps is not an option; set values of the config as key=value: "
    assert said("--steps", "3") == f"{start}train.steps=3"
    assert said("--steps=3") == f"{start}train.steps=3"
    assert said("--steps") == f"{start}train.steps=..."


def test_value_is_not_another_argument():
    assert said("--steps", "train.remat=full", unknown=["--steps"]).endswith("train.steps=...")
    assert "train.steps=..." in said("--steps", "--fresh", unknown=["--steps"])


def test_value_with_spaces_is_quoted():
    assert said("--prompt", "def main").endswith("'sample.prompt=def main'")


def test_other_options_are_unrecognized():
    assert said("--zzzzqqq", "7") == "unrecognized arguments: --zzzzqqq 7"
    assert said("--steps", "3", "stray").splitlines()[-1] == "  unrecognized arguments: stray"


def test_suggests_a_similar_option():
    assert explain_unknown(["--stpe", "4"], ["--stpe", "4"], options=["--step", "--json"]) == (
        "--stpe is not an option; did you mean --step?"
    )
    assert explain_unknown(["--steps", "4"], ["--steps", "4"], options=["--fresh"]).endswith("train.steps=4")


def test_command_without_a_config_has_no_keys():
    assert (
        explain_unknown(["--steps", "4"], ["--steps", "4"], reads_config=False) == "unrecognized arguments: --steps 4"
    )
    told = explain_unknown(["train.steps=4", "x"], ["train.steps=4", "x"], reads_config=False)
    assert told == (
        "train.steps=4: this command does not read a config, so key=value is ignored; remove it\n"
        "  unrecognized arguments: x"
    )


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.steps=3", True),
        ("strategy={fsdp: 2}", True),
        ("train.stps=3", True),
        ("train.steps", False),
        ("x=3", False),
        ("a.train=3", False),
        ("def main(train=3)", False),
        ("=3", False),
        ("runs/train.steps=3", False),
    ],
)
def test_is_override(word, expected):
    assert is_override(word) == expected


def test_existing_file_is_not_an_override(tmp_path, monkeypatch):
    (tmp_path / "strategy=data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert said_without_config("strategy=data") == "unrecognized arguments: strategy=data"
    assert said_without_config("strategy=fsdp").startswith("strategy=fsdp: this command does not read a config")


def said_without_config(word):
    return explain_unknown([word], [word], reads_config=False)


def test_reject_overrides():
    reject_overrides(["runs/a", "x=1"], "spmdkit report", "Give folders.")
    with pytest.raises(
        ValueError, match=r"^train\.steps=3: spmdkit report does not read a config, so .* is ignored\. Give folders"
    ):
        reject_overrides(["runs/a", "train.steps=3"], "spmdkit report", "Give folders.")
