import json

import pytest
from spmdkit.checkpoints.damage import DamagedCheckpoint
from spmdkit.checkpoints.directory import find
from spmdkit.checkpoints.inspect import inspect, text
from support.checkpoint_states import run_state, write


def test_summarizes_a_run(run):
    checkpoints = run / "checkpoints"
    (checkpoints / "40.orbax-checkpoint-tmp").mkdir()
    (checkpoints / "40.orbax-checkpoint-tmp" / "half").write_bytes(bytes(1000))
    (checkpoints / "10").rename(checkpoints / "damaged-10")
    (checkpoints / "removed-5").mkdir()
    (checkpoints / "30" / "state" / "_METADATA").unlink()
    found = inspect(find(str(run)))
    assert json.loads(json.dumps(found)) == found
    assert [line["step"] for line in found["steps"]] == [20, 30]
    assert found["newest"]["step"] == 20
    assert found["unfinished"] == {"40.orbax-checkpoint-tmp": 1000}
    assert (list(found["damaged"]), list(found["leaving"])) == (["damaged-10"], ["removed-5"])
    printed = text(found)
    assert f"{checkpoints}: 2 checkpoints, newest step 30\n" in printed
    assert "KiB  damaged: FileNotFoundError: " in printed
    assert "40.orbax-checkpoint-tmp  1000 B, unfinished: not used" in printed
    assert "set aside: it could not be restored" in printed
    assert "Step 20: 400 parameters of toy\n" in printed
    assert "  saved on the mesh fsdp 8\n  saved by spmdkit 0.1.0, jax 9.9\n  checksums of all arrays" in printed


def test_lists_the_arrays_of_a_checkpoint(original):
    found = inspect(find(str(original), 20))
    assert json.loads(json.dumps(found)) == found
    assert (found["step"], found["parameters"]) == (20, 3 * 16 * 8 + 16)
    assert found["groups"]["params"] == {"arrays": 2, "numbers": 400, "bytes": 4 * 384 + 2 * 16}
    kernel = next(each for each in found["arrays"] if each["path"] == "params/blocks/kernel")
    assert list(kernel.values()) == ["params/blocks/kernel", [3, 16, 8], "float32", 1536]
    lines = text(found).splitlines()
    assert any(line.split() == ["params/norm", "bfloat16", "16", "32", "B"] for line in lines)
    assert any(line.split() == ["step", "int32", "scalar", "4", "B"] for line in lines)


def test_describes_a_checkpoint_without_a_run(tmp_path):
    found = inspect(find(str(write(tmp_path / "run", run_state(3), about=None)), 3))
    assert found["mesh"] == {"fsdp": 8}
    assert "saved on the mesh fsdp 8" in text(found)
    assert "saved by" not in text(found)


def test_a_damaged_checkpoint_is_an_error_only_if_it_was_chosen(run):
    (run / "checkpoints" / "20" / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(DamagedCheckpoint, match="/20 is damaged"):
        inspect(find(str(run), 20))
    found = inspect(find(str(run)))
    assert [bool(line["problem"]) for line in found["steps"]] == [False, True, False]
    assert found["newest"]["step"] == 30


def test_an_empty_directory_has_no_checkpoints(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert text(inspect(find(str(tmp_path)))) == f"{tmp_path / 'checkpoints'}: 0 checkpoints"
