"""The arguments that several commands have, and what is printed only when asked for."""

import argparse

import pytest
from spmdkit.launch.commands.command import Print, add_config, add_fresh, add_json, add_run, add_trained


def parsed(*words, adds):
    parser = argparse.ArgumentParser()
    for add in adds:
        add(parser)
    return vars(parser.parse_args(words))


def test_a_config_and_what_is_laid_over_it():
    assert parsed("my.yaml", adds=[add_config]) == {"config": "my.yaml", "overrides": []}
    found = parsed("my.yaml", "train.steps=3", "--fresh", adds=[add_config, add_fresh])
    assert found == {"config": "my.yaml", "overrides": ["train.steps=3"], "fresh": True}


def test_a_run_and_one_of_its_checkpoints():
    found = parsed("runs/one", "run.simulate=0", "--step", "40", adds=[add_trained, add_json])
    assert found == {"place": "runs/one", "overrides": ["run.simulate=0"], "step": 40, "ema": False, "json": False}
    assert parsed("runs/one", adds=[add_trained])["step"] is None


def test_two_runs_beside_each_other():
    adds = [lambda parser, name=name: add_run(parser, name, name.upper()) for name in ("one", "other")]
    assert parsed("a", "b", adds=adds) == {"one": "a", "other": "b"}


def test_a_text_is_made_when_it_is_asked_for(capsys):
    made = []

    def text():
        made.append(1)
        return "presets\n"

    def add(parser):
        parser.add_argument("--list", action=Print, text=text)
        parser.add_argument("config")  # not needed with --list

    assert parsed("my.yaml", adds=[add])["config"] == "my.yaml"
    assert made == []
    with pytest.raises(SystemExit) as ended:
        parsed("--list", adds=[add])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "presets\n"
