"""Several processes train as one does, and start anew together."""

import re
from pathlib import Path

import pytest
import yaml
from spmdkit.launch.cli import main
from support.runs import losses, metrics, source_module, trained, write_config, write_language_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The config of a run in one process with 8 devices."""
    config = write_language_config(tmp_path_factory.mktemp("alone"))
    assert main(["train", str(config)]) == 0
    return config


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """The config of the same run in 2 processes with 4 devices each."""
    config = write_language_config(tmp_path_factory.mktemp("together"))
    ended = trained("launch", config, "--on", "local:2x4")
    printed = ended.stdout.splitlines()
    assert printed
    assert all(line.startswith(("[0] ", "[1] ")) for line in printed), ended.stdout
    assert "[Gloo]" not in ended.stdout
    assert "2 processes x 4 simulated devices = 8 devices" in ended.stderr
    for rank in range(2):
        assert (config.parent / "run" / "logs" / f"rank-{rank}.log").is_file()
    return config


def test_losses_match_one_process(alone, together):
    expected, found = metrics(alone.parent / "run"), metrics(together.parent / "run")
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.long
def test_fresh_in_several_processes(tmp_path):
    """Process 0 moves the run aside, once, and all start anew; logs go on."""
    config = write_config(tmp_path, train={"steps": 2, "global_batch": 16}, eval={"every": 0, "batches": 1})
    folder, aside = tmp_path / "run", tmp_path / "run.old-1"
    assert main(["train", str(config)]) == 0
    before = losses(folder)
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.log").write_text("what it said before\n")
    printed = trained("launch", config, "run.seed=1", "--on", "local:2x4", "--fresh").stdout
    moved = (
        "checkpoints, metrics.jsonl, report.html, report.json, goodput.jsonl, compilation.json, provenance.json, "
        "config.yaml"
    )
    assert printed.count(f"Moved the run in {folder} to {aside}: {moved}.") == 1
    assert losses(aside) == before
    assert list(losses(folder)) == [1, 2]
    assert losses(folder) != before
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["2"]
    assert not (tmp_path / "run.old-2").exists()
    assert (folder / "logs" / "rank-0.log").read_text().startswith("what it said before\n--- ")


EDITS_AND_DIES = source_module(
    """
    import os, signal
    from pathlib import Path

    CONFIG = Path(__file__).with_name("tiny.yaml")
    """,
    take="""
    text = CONFIG.read_text()
    if self.taken == 7 and os.environ.get("SPMDKIT_PROCESS_ID") == "1" and "0.01" in text:
        CONFIG.write_text(text.replace("0.01", "0.5"))
        os.kill(os.getpid(), signal.SIGKILL)
    """,
)


@pytest.mark.long
def test_a_restart_trains_the_config_that_the_launch_started_with(tmp_path):
    """The learning rate in the file is edited, and a process dies: the next attempt keeps the first learning rate."""
    (tmp_path / "editing.py").write_text(EDITS_AND_DIES)
    config = write_config(tmp_path, data={"source": "editing:rows"})
    reference = write_config(tmp_path / "reference")
    launch = ("--on", "local:2x4", "--restarts", "2")
    ended = trained("launch", config, *launch)
    trained("launch", reference, *launch)
    assert yaml.safe_load(config.read_text())["optimizer"]["learning_rate"] == 0.5
    assert ended.stderr.count("restarting") == 1
    trained_with = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert trained_with["optimizer"]["learning_rate"] == 0.01
    assert metrics(tmp_path / "run") == metrics(tmp_path / "reference" / "run")
    assert len(re.findall(r"tiny\.yaml has changed since this launch began", ended.stderr)) == 1
    (copy,) = (tmp_path / "run" / "logs").glob("config-*.yaml")
    assert f"it started with, {copy}" in ended.stderr
