"""Storage that is full, read-only, slow or forbidden: a run goes on or stops with 75, and the last good step is kept.

Disks are small file systems in memory that root may mount; permissions are taken from root by its capabilities.
"""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from spmdkit.checkpoints.directory import find
from spmdkit.checkpoints.integrity import verify
from spmdkit.launch.cli import main
from support.runs import assert_same_arrays, environment, losses, metrics, run_at_moment, state_arrays, write_config

STEPS = 60
SECTIONS = {
    "train": {"steps": STEPS, "global_batch": 16},
    "checkpoint": {"every": 20, "keep": 2},
    "eval": {"every": 0, "batches": 1},
    "optimizer": {"learning_rate": 0.01},
}
SAVE = "spmdkit.checkpoints.manager:checksums_by_path"
"""A call of each save, after the previous one is complete."""
RECORD = "spmdkit.training.metrics:MetricsLog.write"

pytestmark = [pytest.mark.slow, pytest.mark.faults]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The config of a run that nothing happened to."""
    config = write_config(tmp_path_factory.mktemp("whole"), **SECTIONS)
    assert main(["train", str(config)]) == 0
    return config


@pytest.fixture
def disk(tmp_path) -> Path:
    """A file system of 8 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk: run this as root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def assert_stopped(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    """One message, code 75, no traceback."""
    assert ended.returncode == 75, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert all(word in errors[0] for word in words), errors[0]


def assert_all_good(folder: Path, *steps: int) -> None:
    """The run has these checkpoints, each bit for bit as it was saved, and nothing else."""
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == sorted(map(str, steps))
    assert all(each.is_whole for each in verify(find(str(folder))))


def assert_goes_on(config: Path, whole: Path) -> None:
    """The same command trains to the end, and all is as if nothing had happened."""
    assert main(["train", str(config)]) == 0
    assert losses(config.parent / "run") == losses(whole.parent / "run")
    assert_same_arrays(state_arrays(config, STEPS), state_arrays(whole, STEPS))


@pytest.mark.parametrize(
    "moment",
    [SAVE, "event:os.mkdir:40.orbax-checkpoint-tmp", "event:os.rename:checkpoints/40'"],
    ids=["before", "once it has begun", "before its end"],
)
def test_full_disk_during_save(moment, disk, whole):
    config = write_config(disk, **SECTIONS)
    ended = run_at_moment(moment, "2" if moment == SAVE else "1", "fill", disk, "train", config)
    assert_stopped(ended, "No space left on device")
    if "rename" not in moment:  # else of 40 all was written but its name, and what comes next finds no room
        said = "Complete there: [20]; a checkpoint takes up to ", " and 0 B are free"
        assert_stopped(ended, "Checkpoint of step 40 could not be written", *said)
    assert_all_good(disk / "run", *find(str(disk / "run")).contents.steps)
    assert 20 in find(str(disk / "run")).contents.steps
    (disk / "filler").unlink()
    assert_goes_on(config, whole)


@pytest.mark.parametrize("reason", ["EDQUOT", "EIO"])
def test_save_fails_at_its_end(reason, whole, tmp_path):
    """What it wrote is gone: a quota would stay used up, and the same command could not even begin."""
    config = write_config(tmp_path, **SECTIONS)
    ended = run_at_moment("event:os.rename:checkpoints/40'", "1", "fail", reason, "train", config)
    assert_stopped(ended, "Checkpoint of step 40 could not be written", os.strerror(getattr(errno, reason)))
    assert_all_good(tmp_path / "run", 20)
    assert_goes_on(config, whole)


@pytest.fixture
def stopped(disk) -> Path:
    """The config of a run that has trained 20 steps, and then found the disk full under its metrics."""
    config = write_config(disk, **SECTIONS)
    assert main(["train", str(config), "train.steps=20"]) == 0
    ended = run_at_moment(RECORD, "2", "fill", disk, "train", config, "checkpoint.every=0")
    assert_stopped(ended, "metrics.jsonl: No space left on device")
    return config


def test_full_disk_under_metrics(stopped, disk, whole):
    assert_all_good(disk / "run", 20)
    text = (disk / "run" / "metrics.jsonl").read_text()
    assert text.endswith("}\n"), "no half line"
    assert '"step": 22' in text
    (disk / "filler").unlink()
    assert_goes_on(stopped, whole)


def test_full_disk_on_resume(stopped, disk, whole):
    for _ in range(2):
        ended = run_at_moment(RECORD, "0", "slow", "0", "train", stopped)
        assert_stopped(ended, str(disk / "run"), "No space left on device")
    assert_all_good(disk / "run", 20)
    (disk / "filler").unlink()
    assert_goes_on(stopped, whole)


def test_checkpoints_become_read_only(disk, whole, tmp_path):
    """Their own file system: what else the run writes goes elsewhere."""
    config = write_config(tmp_path, **SECTIONS)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(disk)
    ended = run_at_moment(SAVE, "2", "readonly", disk, "train", config)
    assert_stopped(ended, "Checkpoint of step 40 could not be written", "Read-only file system")
    assert_all_good(tmp_path / "run", 20)
    again = run_at_moment(SAVE, "0", "slow", "0", "train", config)
    assert_stopped(again, "checkpoints of run.dir is not writable: Read-only file system")
    assert_all_good(tmp_path / "run", 20)
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert_goes_on(config, whole)


def test_saves_slower_than_steps(whole, tmp_path):
    """Training waits for the previous one, says so, and never holds two."""
    config = write_config(tmp_path, **SECTIONS)
    ended = run_at_moment("event:os.rename:orbax-checkpoint-tmp", "0", "slow", "2.5", "train", config)
    assert ended.returncode == 0, ended.stderr
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if "warning: training waited" in line]
    assert said
    assert "at step 40 for the checkpoint of step 20" in said[0]
    assert "Raise checkpoint.every, or give run.dir a faster file system." in said[0]
    assert metrics(tmp_path / "run") == metrics(whole.parent / "run")
    assert_all_good(tmp_path / "run", 40, 60)


@pytest.mark.parametrize("victim", ["state/manifest.ocdbt", "state/_METADATA", "."])
def test_leaves_unreadable_checkpoint(victim, whole, tmp_path):
    """Permission is no damage: nobody is advised to remove it, and no other one is taken."""
    if os.geteuid() != 0:
        pytest.skip("the files have to be root's, and the reader somebody else: run this as root")
    config = write_config(tmp_path, **SECTIONS)
    shutil.copytree(whole.parent / "run", tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    victim = tmp_path / "run" / "checkpoints" / "60" / victim
    mode = victim.stat().st_mode
    victim.chmod(0)
    without = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-dac_override"]
    command = [*without, sys.executable, "-m", "spmdkit"]
    for words in (["train", config], ["checkpoint", "verify", tmp_path / "run"]):
        ended = subprocess.run([*command, *words], env=environment(), capture_output=True, text=True, timeout=240)
        assert_stopped(ended, "/60 cannot be read now: ", "It may be intact: leave it there")
    victim.chmod(mode)
    assert_all_good(tmp_path / "run", 40, 60)
    assert_goes_on(config, whole)
