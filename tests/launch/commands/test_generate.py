"""`spmdkit generate` as it is typed."""

import json

import pytest
from runs import write_language_config
from small_runs import leave_run
from spmdkit.launch.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    config = write_language_config(tmp_path_factory.mktemp("generate"), strategy={"fsdp": 8}, sample={"length": 3})
    leave_run(config, steps=(4,))
    return config


def call(capsys, *words):
    capsys.readouterr()
    code = main(["generate", *map(str, words)])
    return code, capsys.readouterr()


def test_a_prompt_is_continued(language, capsys):
    run = language.parent / "run"
    code, printed = call(capsys, run, "mesh ", "--length", "4", "--temperature", "0", "--json")
    found = json.loads(printed.out)
    assert (code, found["step"], bytes(found["tokens"][:5]), len(found["tokens"])) == (0, 4, b"mesh ", 9)
    code, printed = call(
        capsys, language, "mesh ", "--length", "4", "--temperature", "0", "--set", "strategy={data: 1}"
    )
    assert (code, printed.out[:5]) == (0, "mesh ")


def test_what_is_not_said_the_config_says(language, capsys):
    found = [json.loads(call(capsys, language, "--json", *words)[1].out) for words in ([], [], ["--seed", "7"])]
    assert bytes(found[0]["tokens"][:4]) == b"def "
    assert len(found[0]["tokens"]) == 7
    assert found[0] == found[1] != found[2]


def test_what_is_no_language_model(untrained, capsys):
    code, printed = call(capsys, untrained, "1 2")
    assert code == 2
    assert "The inputs of mlp are 64 numbers, not tokens, so it cannot continue a prompt." in printed.err
