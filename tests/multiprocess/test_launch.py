"""Several processes train as one does; when one fails, all end at once, and the same command goes on."""

import re
import time
from pathlib import Path

import pytest
from runs import losses, metrics, source_module, spmdkit, state_arrays, trained, write_config, write_language_config
from spmdkit.launch.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

BOUND = 60
"""Seconds to the end of all processes, for a machine with much else to do; three suffice where it is idle."""

FAULTY = source_module(
    """
    import os, signal, time
    from pathlib import Path

    FAULT = os.environ.get("FAULT", "")
    """,
    take="""
    if FAULT.endswith(os.environ.get("SPMDKIT_PROCESS_ID", "-")) and self.taken == 9:
        if FAULT.startswith("kill"):  # batches are read ahead of the steps: not before step 4 is saved
            while not Path(__file__).with_name("run").joinpath("checkpoints", "4").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the disk is gone")
    """,
)


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


def test_losses_are_those_of_one_process(alone, together):
    expected, found = metrics(alone.parent / "run"), metrics(together.parent / "run")
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_parameters_are_those_of_one_process(alone, together):
    expected, found = state_arrays(alone, 12), state_arrays(together, 12)
    for path, leaf in expected.items():
        assert found[path] == pytest.approx(leaf, rel=1e-3, abs=1e-4), path


def faulty_config(folder: Path) -> Path:
    (folder / "faulty.py").write_text(FAULTY)
    return write_config(folder, data={"source": "faulty:rows"})


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """The folder of a run in 2 processes that nothing happened to."""
    config = faulty_config(tmp_path_factory.mktemp("sound"))
    trained("launch", config, "--on", "local:2x4")
    return config.parent / "run"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "code", "ending"), [("kill1", 75, "killed by SIGKILL (exit code 75)"), ("raise0", 1, "exit code 1")]
)
def test_one_that_fails_ends_all_and_the_same_command_goes_on(fault, code, ending, sound, tmp_path):
    command = ["launch", faulty_config(tmp_path), "--on", "local:2x4"]
    start = time.monotonic()
    ended = spmdkit(*command, FAULT=fault)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert time.monotonic() - start < BOUND
    assert f"spmdkit launch: rank {fault[-1]} failed first: {ending}." in ended.stderr
    if code == 1:
        assert "the disk is gone" in ended.stderr
    assert max(losses(tmp_path / "run"), default=0) < 12
    trained(*command)
    assert metrics(tmp_path / "run") == metrics(sound)


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


@pytest.mark.faults
def test_a_run_that_dies_goes_on_by_itself(sound, tmp_path):
    """Killed at the ninth batch, when step 4 is saved; it starts again from the newest checkpoint, to the same end."""
    ended = spmdkit("launch", faulty_config(tmp_path), "--on", "local:2x4", "--restarts", "2", FAULT="kill1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr.count("rank 1 failed first: killed by SIGKILL") == 1
    assert re.search(r"spmdkit launch: starting again (in 1 s )?from step [48]", ended.stderr)
    assert metrics(tmp_path / "run") == metrics(sound)
