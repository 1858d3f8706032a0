"""`spmdkit generate` as it is typed."""

import json

import pytest
from runs import write_language_config
from small_runs import leave_run
from spmdkit.launch.cli import main
from spmdkit.launch.commands.generate import prompt_and_overrides

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([None], (None, [])),
        (["def main"], ("def main", [])),
        (["run.simulate=0"], (None, ["run.simulate=0"])),
        (["run.simulate=0", "def main", "strategy={data: 1}"], ("def main", ["run.simulate=0", "strategy={data: 1}"])),
        (["x = 1"], ("x = 1", [])),
        (["f(data=3)"], ("f(data=3)", [])),
        (["train.stps=3"], (None, ["train.stps=3"])),
    ],
)
def test_a_prompt_is_no_key_and_value(words, expected):
    assert prompt_and_overrides(words[0], words[1:]) == expected


def test_a_prompt_that_reads_like_one():
    assert prompt_and_overrides(None, [], "data.files=[") == ("data.files=[", [])
    assert prompt_and_overrides("run.seed=1", [], "run.seed=") == ("run.seed=", ["run.seed=1"])


def test_a_prompt_without_quotes_is_told():
    with pytest.raises(
        ValueError, match=r"one PROMPT, and these are 2: 'def', 'main'\. Put a prompt of several words into"
    ):
        prompt_and_overrides("def", ["main"])


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    config = write_language_config(tmp_path_factory.mktemp("generate"), strategy={"fsdp": 8}, sample={"length": 3})
    leave_run(config, steps=(4,))
    return config


def call(capsys, *words):
    capsys.readouterr()
    code = main(["generate", *map(str, words)])
    return code, capsys.readouterr()


@slow
def test_a_prompt_is_continued(language, capsys):
    run = language.parent / "run"
    code, printed = call(capsys, run, "mesh ", "--length", "4", "--temperature", "0", "--json")
    found = json.loads(printed.out)
    assert (code, found["step"], bytes(found["tokens"][:5]), len(found["tokens"])) == (0, 4, b"mesh ", 9)
    code, printed = call(
        capsys, language, "strategy={data: 1}", "mesh ", "--length", "4", "--temperature", "0", "run.seed=3"
    )
    assert (code, printed.out[:5]) == (0, "mesh ")


@slow
def test_what_is_not_said_the_config_says(language, capsys):
    found = [json.loads(call(capsys, language, "--json", *words)[1].out) for words in ([], [], ["--seed", "7"])]
    assert bytes(found[0]["tokens"][:4]) == b"def "
    assert len(found[0]["tokens"]) == 7
    assert found[0] == found[1] != found[2]


@slow
def test_what_is_no_language_model(untrained, capsys):
    for prompt in ("1 2", "def main"):
        code, printed = call(capsys, untrained, prompt)
        assert code == 2
        assert "The inputs of mlp are 64 numbers, not tokens, so it cannot continue a prompt." in printed.err


@slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--length", "1000000000"], "sample.length must be at most"),
        (["--seed", "4294967296"], "run.seed=4294967296 has to be from 0 to 2**32 - 1"),
        (["--temperature", "nan"], "sample.temperature must be a number"),
        (["\udcff"], "The prompt '\\udcff' is not text in UTF-8"),
    ],
)
def test_rejects_invalid_options(language, words, said, capsys):
    code, printed = call(capsys, language.parent / "run", *words)
    assert code == 2
    assert said in printed.err
    assert "Traceback" not in printed.err
