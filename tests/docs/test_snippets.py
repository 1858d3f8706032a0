"""Every Python snippet runs, every config loads, and every command names things that exist."""

import re

import jax
import pytest
from figures import write_files
from pages import PAGES, ROOT, blocks, commands, name
from spmdkit.configs import load_config
from spmdkit.launch.cli import COMMANDS, find_part, make_command_parser
from spmdkit.launch.places import find_place
from spmdkit.launch.remote.hosts import read_hosts
from spmdkit.launch.sweeping.planning import Asked, plan
from spmdkit.mesh.axes import AXES


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_runs(page, tmp_path, monkeypatch):
    """The snippets of a page run one after the other, as one program."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "snippets"}
    promotion = "allow" if page.parent.name == "coming-from" else "raise"  # Keras adds vectors to matrices
    with jax.numpy_rank_promotion(promotion):
        for block in blocks(page, "python"):
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=name)
def test_configs_load(page, tmp_path):
    for block in blocks(page, "yaml"):
        file = tmp_path / "snippet.yaml"
        file.write_text(block.text, encoding="utf-8")
        read_hosts(file) if block.text.startswith("# hosts.yaml\n") else load_config(file)


@pytest.mark.parametrize("words", [words for page in PAGES for words in commands(page)], ids=" ".join)
def test_commands_parse(words, tmp_path, monkeypatch):
    """Presets and files exist, options are known, and overrides are valid (but where the page shows an error)."""
    monkeypatch.chdir(ROOT)
    if not words or words == ["--version"]:
        return
    words = words[: words.index(">")] if ">" in words else words
    command = next(command for command in COMMANDS if command.name == words[0])
    if words[1:] in (["--list"], ["--help-config"], ["--help"]):
        return
    part, rest = find_part(command, words[1:])
    arguments = make_command_parser(part).parse_intermixed_args(rest)
    if getattr(arguments, "config", None) is None:  # `schedule` takes none, nor `init`; `doctor` may do without
        return
    source = arguments.config
    if source == "my.yaml":  # what the reader is told to write
        source = tmp_path / "my.yaml"
        source.write_text("run: {simulate: 8}\n", encoding="utf-8")
    if source == "tiny.yaml":  # what the page shows
        write_files((ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8"), tmp_path)
        source = tmp_path / "tiny.yaml"
    given = words[0] != "launch" or arguments.on == "ssh:hosts.yaml"  # another file that the reader is told to write
    target = None if given else find_place(arguments.on)[1]
    sizes = [getattr(target, name, None) or None for name in ("num_processes", "devices")]  # None: as the config says
    processes, devices = sizes if target else (1, None)
    if words[0] == "sweep":
        on = find_place(arguments.on)[1] if arguments.on else None
        runs = plan(Asked(str(source), arguments.overrides, arguments.zip, fresh=True, on=on))
        assert [run.problem for run in runs if run.problem] == []
    elif " ".join(words) in SHOWN_TO_FAIL:
        with pytest.raises(ValueError) as caught:
            load_config(source, arguments.overrides)
        assert f"error: {caught.value}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    else:
        load_config(source, arguments.overrides, num_processes=processes, simulate=devices)


SHOWN_TO_FAIL = ["train quickstart strategy.fsdp=3 train.step=4 optimizer.lr=1e-3"]
"""Commands that README shows with their error, which has to be the true one."""


def test_the_model_and_the_config_of_readme_are_short():
    """Twelve lines of Python and five of YAML, the names of the files aside."""
    (model, *_), (config, *_) = blocks(PAGES[0], "python"), blocks(PAGES[0], "yaml")
    assert len([line for line in model.text.splitlines() if line and not line.startswith("#")]) <= 12
    assert len(config.text.splitlines()) <= 6


def strategies_of_readme():
    table = PAGES[0].read_text(encoding="utf-8").split("## Which strategy\n")[1].split("\n## ")[0]
    cells = [row.split("|")[2] for row in table.splitlines() if row.startswith("| it") or row.startswith("| the")]
    return [strategy for cell in cells for strategy in re.findall(r"`([a-z]+: [^`]+)`", cell)]


@pytest.mark.parametrize("strategy", strategies_of_readme())
def test_every_strategy_that_readme_advises_loads(strategy):
    devices = 64 if "-1" in strategy else 2
    sizes = [f"run.simulate={devices}", "train.global_batch=1024", "train.steps=64"]
    load_config("fsdp", [f"strategy={{{strategy}}}", *sizes])


def test_the_advice_names_every_axis():
    named = {key for strategy in strategies_of_readme() for key in re.findall(r"(\w+): [-{\d]", strategy)}
    assert named >= set(AXES)
