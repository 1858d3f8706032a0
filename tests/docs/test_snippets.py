"""Every Python snippet runs, every config loads, and every command names things that exist."""

import pytest
from pages import PAGES, ROOT, blocks, commands, name
from spmdkit.configs import load_config
from spmdkit.launch.cli import COMMANDS, make_command_parser
from spmdkit.launch.explain import explain
from spmdkit.launch.target import parse_target


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_runs(page, tmp_path, monkeypatch):
    """The snippets of a page run one after the other, as one program."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "snippets"}
    for block in blocks(page, "python"):
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=name)
def test_configs_load(page, tmp_path):
    for block in blocks(page, "yaml"):
        file = tmp_path / "snippet.yaml"
        file.write_text(block.text, encoding="utf-8")
        load_config(file)


@pytest.mark.parametrize("words", [words for page in PAGES for words in commands(page)], ids=" ".join)
def test_commands_parse(words, tmp_path, monkeypatch):
    """Presets and files exist, options are known, and overrides are valid (but where the page shows an error)."""
    monkeypatch.chdir(ROOT)
    command = next(command for command in COMMANDS if command.name == words[0])
    arguments = make_command_parser(command).parse_intermixed_args(words[1:])
    if "config" not in arguments:  # `schedule` takes none, nor `init`
        return
    source = arguments.config
    if source == "my.yaml":  # what the reader is told to write
        source = tmp_path / "my.yaml"
        source.write_text("run: {simulate: 8}\n", encoding="utf-8")
    target = parse_target(arguments.on) if words[0] == "launch" else None
    processes, devices = (target.num_processes, target.devices) if target else (1, None)
    if " ".join(words) in SHOWN_TO_FAIL:
        with pytest.raises(ValueError) as caught:
            load_config(source, arguments.overrides)
        assert f"error: {caught.value}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    else:
        load_config(source, arguments.overrides, num_processes=processes, simulate=devices)


SHOWN_TO_FAIL = ["train quickstart strategy.fsdp=3 train.step=4"]
"""Commands that README shows with their error, which has to be the true one."""


@pytest.mark.slow
def test_readme_shows_what_explain_prints():
    """Every line that README shows of `spmdkit explain quickstart`, but for the dots."""
    command = "$ spmdkit explain quickstart"
    shown = next(block for block in blocks(PAGES[0], "console") if block.text.startswith(command))
    printed = str(explain(load_config("quickstart"))).splitlines()
    assert [line for line in shown.text.splitlines()[1:] if line != "..." and line not in printed] == []
