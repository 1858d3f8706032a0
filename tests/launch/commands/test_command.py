"""Shared arguments, `schema` and `completion`."""

import argparse
import json
import os
import subprocess

import pytest
from spmdkit.configs.config_text import config_schema
from spmdkit.launch.cli import COMMANDS, main
from spmdkit.launch.commands.command import Print, add_config, add_fresh, add_json, add_trained
from spmdkit.launch.commands.completion import SHELLS


def parsed(*words, adds):
    parser = argparse.ArgumentParser()
    for add in adds:
        add(parser)
    return vars(parser.parse_args(words))


def test_config_arguments():
    assert parsed("my.yaml", adds=[add_config]) == {"config": "my.yaml", "overrides": []}
    found = parsed("my.yaml", "train.steps=3", "--fresh", adds=[add_config, add_fresh])
    assert found == {"config": "my.yaml", "overrides": ["train.steps=3"], "fresh": True}


def test_run_arguments():
    found = parsed("runs/one", "run.simulate=0", "--step", "40", adds=[add_trained, add_json])
    assert found == {"place": "runs/one", "overrides": ["run.simulate=0"], "step": 40, "ema": False, "json": False}
    assert parsed("runs/one", adds=[add_trained])["step"] is None


def test_text_is_computed_only_if_printed(capsys):
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


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Shell -> its script."""
    found = {}
    for shell in SHELLS:
        with pytest.MonkeyPatch.context() as patch:
            lines = []
            patch.setattr("builtins.print", lambda *words, lines=lines, **options: lines.extend(words))
            assert main(["completion", shell]) == 0
        found[shell] = "\n".join(lines)
    return found


def completed(script, folder, *words):
    """Returns what bash proposes for the last word."""
    (folder / "completion.sh").write_text(script, encoding="utf-8")
    line = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_spmdkit; echo ${{COMPREPLY[@]}}"
    ended = subprocess.run(
        ["bash", "-c", f"shopt -s extglob; source completion.sh; {ask}"],
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    return ended.stdout.split()


def test_bash_completes_commands_options_and_files(scripts, tmp_path):
    (tmp_path / "mine.yaml").write_text("", encoding="utf-8")
    names = {command.name for command in COMMANDS}
    assert names <= set(completed(scripts["bash"], tmp_path, "spmdkit", ""))
    assert completed(scripts["bash"], tmp_path, "spmdkit", "expo") == ["export"]
    assert completed(scripts["bash"], tmp_path, "spmdkit", "train", "--fr") == ["--fresh"]
    assert completed(scripts["bash"], tmp_path, "spmdkit", "train", "min") == ["mine.yaml"]
    assert completed(scripts["bash"], tmp_path, "spmdkit", "checkpoint", "ver") == ["verify"]
    assert "hugging_face" in completed(scripts["bash"], tmp_path, "spmdkit", "export", "r", "t", "--to", "")


def test_zsh_has_every_command(scripts):
    assert scripts["zsh"].startswith("#compdef spmdkit")
    assert [command.name for command in COMMANDS if f"\n    {command.name}:'" not in scripts["zsh"]] == []


def test_rejects_other_shells(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "fish"])
    assert "invalid choice: 'fish'" in capsys.readouterr().err


def test_prints_the_json_schema(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == config_schema()
