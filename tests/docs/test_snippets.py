"""Every block of every page runs as written, and every command names things that exist."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from figures import write_files
from spmdkit.configs import load_config
from spmdkit.launch.cli import COMMANDS, make_command_parser
from spmdkit.launch.launchers import find_launcher
from support.pages import PAGES, ROOT, commands, name, runnable
from support.runs import CACHE

RUNNER = Path(__file__).parents[1] / "support" / "run_page.py"


def is_long(page):
    """Returns True if a page has commands, each a process of its own that compiles, or takes over ten seconds."""
    has_commands = any(block["language"] in ("sh", "console") for block in runnable(page))
    return has_commands or page.stem in ("keras", "torchtitan")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if is_long(page) else (), id=name(page))
        for page in PAGES
        if runnable(page)
    ],
)
def test_a_page_runs_as_written(page, tmp_path):
    """All Python, YAML and shell blocks in their order, in a fresh process, with no setup."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "SPMDKIT_", "KERAS_"))
    }
    promotion = "allow" if page.parent.name == "coming-from" else "raise"  # Keras adds vectors to matrices
    commands_first = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # a clone has them
    ended = subprocess.run(
        [sys.executable, "-c", RUNNER.read_text(encoding="utf-8"), page],
        input=json.dumps(runnable(page)),
        cwd=tmp_path,
        env=kept
        | {"PATH": commands_first, "JAX_COMPILATION_CACHE_DIR": str(CACHE), "JAX_NUMPY_RANK_PROMOTION": promotion},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]


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
    arguments = make_command_parser(command).parse_intermixed_args(words[1:])
    if getattr(arguments, "config", None) is None:  # `schedule` takes none, nor `init`; `doctor` may do without
        return
    source = arguments.config
    if source == "my.yaml":  # what the reader is told to write
        source = tmp_path / "my.yaml"
        source.write_text("run: {simulate: 8}\n", encoding="utf-8")
    elif shown := next((text for text in map(Path.read_text, PAGES) if f"```yaml\n# {source}\n" in text), None):
        write_files(shown, tmp_path)
        source = tmp_path / source
    given = words[0] != "launch" or arguments.on == "ssh:hosts.yaml"  # another file that the reader is told to write
    target = None if given else find_launcher(arguments.on)[1]
    sizes = [getattr(target, name, None) or None for name in ("num_processes", "devices")]  # None: as the config says
    processes, devices = (1, None) if target is None else sizes
    if " ".join(words) in SHOWN_TO_FAIL:
        with pytest.raises(ValueError) as caught:
            load_config(source, arguments.overrides)
        assert f"error: {caught.value}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    else:
        load_config(source, arguments.overrides, num_processes=processes, simulate=devices)


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in PAGES])
def test_no_command_of_a_page_trains_a_finished_run_again(page):
    """It would only answer that the run is finished."""
    trained = set()
    for words in commands(page):
        arguments = [word for word in words if not word.startswith("strategy")]
        trains = words[:1] in (["train"], ["launch"]) and not {"--dry-run", "--fresh", "--help"} & set(words)
        if not trains or len(words) == 1 or " ".join(words) in SHOWN_TO_FAIL:
            continue
        changes = [word for word in arguments if word.startswith(("run.dir=", "train.steps="))]
        run = (words[1], *changes)
        assert run not in trained, f"give {' '.join(words)} a run.dir of its own"
        trained.add(run)


SHOWN_TO_FAIL = ["train quickstart strategy.fsdp=3 train.step=4 optimizer.lr=1e-3"]
"""Commands that README shows with their error, which has to be the true one."""


def strategies_of_readme():
    table = PAGES[0].read_text(encoding="utf-8").split("## Which strategy\n")[1].split("\n## ")[0]
    cells = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")]
    return [strategy for cell in cells for strategy in re.findall(r"`([a-z]+: [^`]+)`", cell)]


@pytest.mark.parametrize("strategy", strategies_of_readme())
def test_every_strategy_that_readme_advises_loads(strategy):
    devices = 64 if "-1" in strategy else 2
    sizes = [f"run.simulate={devices}", "train.global_batch=1024", "train.steps=64"]
    load_config("fsdp", [f"strategy={{{strategy}}}", *sizes])
