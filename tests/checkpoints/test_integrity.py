import subprocess
import sys

import pytest
from spmdkit.checkpoints import integrity, restore
from spmdkit.checkpoints.checksums import read_description
from spmdkit.checkpoints.directory import find
from spmdkit.checkpoints.integrity import ByteProgress, summary, verify, verify_one
from spmdkit.launch.cli import main
from support.faults import damage


def test_intact_checkpoints_are_whole(original, monkeypatch, capsys):
    monkeypatch.setattr(integrity, "PROGRESS_SECONDS", 0.0)
    monkeypatch.chdir(original)
    verdicts = list(verify(find(str(original))))
    assert [each.folder.name for each in verdicts] == ["10", "20", "30"]
    assert all(each.is_whole for each in verdicts)
    assert str(verdicts[0]) == "checkpoints/10: whole; 7 arrays, 3.1 KiB are bit for bit what was saved"
    assert summary(verdicts) == "3 checkpoints verified"
    assert "checkpoints/30: 3.1 KiB of 3.1 KiB" in capsys.readouterr().err


def test_progress_is_printed_every_few_seconds(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(integrity.time, "monotonic", lambda: now[0])
    progress = ByteProgress("step 4", 4096)
    for number in range(8):
        now[0] = float(number)
        progress.add(512)
    assert capsys.readouterr().err == "step 4: 3 KiB of 4 KiB\n"


def test_damaged_checkpoints_are_named(run):
    damage(run / "checkpoints" / "20", "flip")
    (run / "checkpoints" / "30" / "state" / "_METADATA").unlink()
    verdicts = {each.folder.name: each for each in verify(find(str(run)))}
    assert [name for name, each in verdicts.items() if each.is_whole] == ["10"]
    assert "/20: DAMAGED\n  " in str(verdicts["20"])
    assert "_METADATA" in str(verdicts["30"])
    assert summary(list(verdicts.values())).startswith("2 of 3 checkpoints damaged: 20, 30. ")
    assert main(["checkpoint", "verify", str(run)]) == 2


@pytest.mark.parametrize("group_bytes", [1, 1 << 20])
def test_a_changed_array_is_named(original, monkeypatch, group_bytes):
    """The files are what was written; an array had changed on its way to them."""
    description = read_description(original / "checkpoints" / "20")
    changed = {**description, "checksums": {**description["checksums"], "params/norm": 1}}
    monkeypatch.setattr(restore, "GROUP_BYTES", group_bytes)
    monkeypatch.setattr(restore, "read_description", lambda folder: changed)
    verdict = verify_one(original / "checkpoints" / "20")
    assert verdict.problems == {"params/norm": "it reads as other bits than were saved"}
    assert "  params/norm: it reads as other bits than were saved" in str(verdict)
    facts = {"folder": str(verdict.folder), "whole": False, "arrays": 7, "bytes": verdict.num_bytes}
    assert verdict.to_json() == {**facts, "problems": verdict.problems, "foreign": ""}


def test_verifies_a_run_that_is_reached_through_its_parent(original, monkeypatch):
    """TensorStore rejects a path that contains `..`."""
    (original / "logs").mkdir(exist_ok=True)
    monkeypatch.chdir(original / "logs")
    for given in ("..", f"../../{original.name}", str(original / "logs" / ".." / "checkpoints" / "10")):
        assert all(each.is_whole for each in verify(find(given)))


@pytest.mark.slow
@pytest.mark.parametrize("words", ["checkpoint verify {}", "checkpoint inspect {}", "export {} out.safetensors"])
def test_commands_open_no_accelerator(original, words, tmp_path):
    """The platform of the environment does not exist: only the CPU is opened."""
    code = "import sys; from spmdkit.launch.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *words.format(original).split()]
    environment = {"JAX_PLATFORMS": "nowhere", "PATH": ""}
    subprocess.run(command, check=True, env=environment, timeout=120, cwd=tmp_path)
