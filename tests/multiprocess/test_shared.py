"""Processes that see different folders under the name of run.dir end, named, before they train or lose anything."""

import shutil

import pytest
from support.processes import start, wait
from support.runs import listing, source_module, trained, write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
OPTIONS = {"train": {"steps": 8, "global_batch": 16}, "checkpoint": {"every": 4}, "eval": {"every": 0, "batches": 1}}


@pytest.fixture
def hosts(tmp_path):
    """Two working directories: run.dir is relative, and so another folder in each."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    config = write_config(tmp_path, **OPTIONS)
    config.write_text(config.read_text().replace(str(tmp_path / "run"), "run"))
    return config, folders


def assert_named(ended):
    assert [each.code for each in ended] == [2, 2], [each.stderr for each in ended]
    for each in ended:
        assert "Set run.dir to an absolute path on a file system that all hosts mount" in each.stderr
        assert "Traceback" not in each.stderr


@pytest.mark.long
def test_rejects_unshared_directory_of_new_run(hosts):
    config, folders = hosts
    ended = wait(start(config, [[], []], folders=folders))
    assert_named(ended)
    assert "error: run.dir is not shared between ranks 0 and 1: " in ended[0].stderr
    assert [path.name for folder in folders for path in folder.rglob("*")] == ["run"]


@pytest.mark.faults
@pytest.mark.parametrize("copied", ["nothing", "an earlier step", "all"])
def test_rejects_unshared_directory_on_resume(copied, hosts):
    config, (one, other) = hosts
    trained("train", config, f"run.dir={one}/run", "train.steps=8")
    if copied != "nothing":
        shutil.copytree(one / "run", other / "run")
    if copied == "an earlier step":
        shutil.rmtree(other / "run" / "checkpoints" / "8")
    before = listing(one), listing(other)
    ended = wait(start(config, [["train.steps=12"]] * 2, folders=[one, other]))
    assert_named(ended)
    if copied != "all":
        seen = {"nothing": 0, "an earlier step": 4}[copied]
        assert f"latest checkpoint in run.dir: 8 on rank 0, {seen} on rank 1" in ended[0].stderr
    assert (listing(one), listing(other)) == before


LATE = source_module(
    """
    import os, time
    """,
    take="""
    if os.environ["SPMDKIT_PROCESS_ID"] == "0":
        time.sleep(2)
    """,
)


def test_reads_directory_after_process_0_created_it(tmp_path):
    """Process 1 comes first, to a folder that is not there yet."""
    (tmp_path / "late.py").write_text(LATE)
    config = write_config(tmp_path, data={"source": "late:rows"}, train={"steps": 1, "global_batch": 16})
    ended = wait(start(config, [[], []]))
    assert [each.code for each in ended] == [0, 0], ended[1].stderr
