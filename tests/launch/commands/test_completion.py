"""`schema` and `completion`."""

import contextlib
import io
import json
import os
import subprocess

import pytest
from spmdkit.configs.config_text import config_schema
from spmdkit.launch.cli import COMMANDS, main
from spmdkit.launch.commands.completion import SHELLS


@pytest.fixture(scope="module")
def scripts():
    """Shell -> its script."""
    found = {}
    for shell in SHELLS:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["completion", shell]) == 0
        found[shell] = printed.getvalue()
    return found


def completed(script, folder, *words):
    """Returns what bash proposes for the last word."""
    (folder / "completion.sh").write_text(script, encoding="utf-8")
    line = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_spmdkit; echo ${{COMPREPLY[@]}}"
    words, env = ["bash", "-c", f"shopt -s extglob; source completion.sh; {ask}"], {"PATH": os.environ["PATH"]}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True).stdout.split()


def test_bash_completes_commands_options_and_files(scripts, tmp_path):
    (tmp_path / "mine.yaml").write_text("", encoding="utf-8")
    names = {command.name for command in COMMANDS}
    assert names <= set(completed(scripts["bash"], tmp_path, "spmdkit", ""))
    assert completed(scripts["bash"], tmp_path, "spmdkit", "expo") == ["export"]
    assert completed(scripts["bash"], tmp_path, "spmdkit", "train", "--fr") == ["--fresh"]
    assert completed(scripts["bash"], tmp_path, "spmdkit", "train", "min") == ["mine.yaml"]
    (tmp_path / "runs").mkdir()
    assert completed(scripts["bash"], tmp_path, "spmdkit", "report", "ru") == ["runs"]
    assert "verify" in completed(scripts["bash"], tmp_path, "spmdkit", "checkpoint", "")
    assert "hugging_face" in completed(scripts["bash"], tmp_path, "spmdkit", "export", "r", "t", "--to", "")


def test_zsh_has_every_command(scripts):
    assert scripts["zsh"].startswith("#compdef spmdkit")
    assert [command.name for command in COMMANDS if f"\n    {command.name}:'" not in scripts["zsh"]] == []


def test_prints_the_json_schema(cli):
    assert json.loads(cli(0, "schema").out) == config_schema()
