import json

import pytest
from small_checkpoints import host_state, write
from spmdkit.launch.inspection.finding import find
from spmdkit.launch.inspection.inspect import inspect, text
from spmdkit.training.checkpointing.errors import DamagedCheckpoint


def test_a_run_in_short(run):
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
    assert list(found["damaged"]) == ["damaged-10"]
    assert list(found["leaving"]) == ["removed-5"]
    printed = text(found)
    assert f"{checkpoints}: 2 checkpoints, newest step 30\n" in printed
    assert "KiB  damaged: FileNotFoundError: " in printed
    assert "40.orbax-checkpoint-tmp  1000 B, unfinished: not used" in printed
    assert "set aside: it could not be restored" in printed
    assert "Step 20: 400 parameters of toy\n" in printed
    assert "  saved on the mesh fsdp 8\n  saved by spmdkit 0.1.0, jax 9.9\n  checksums of all arrays" in printed


def test_one_checkpoint_with_all_its_arrays(original):
    found = inspect(find(str(original), 20))
    assert json.loads(json.dumps(found)) == found
    assert (found["step"], found["parameters"], found["checksums"]) == (20, 3 * 16 * 8 + 16, True)
    assert found["groups"]["params"] == {"arrays": 2, "numbers": 400, "bytes": 4 * 384 + 2 * 16}
    kernel = next(each for each in found["arrays"] if each["path"] == "params/blocks/kernel")
    assert kernel == {
        "path": "params/blocks/kernel",
        "shape": [3, 16, 8],
        "dtype": "float32",
        "bytes": 1536,
        "chunk": [3, 2, 8],
    }
    lines = text(found).splitlines()
    assert any(line.split() == ["params/norm", "bfloat16", "16", "32", "B"] for line in lines)
    assert any(line.split() == ["step", "int32", "scalar", "4", "B"] for line in lines)


def test_of_an_earlier_version_it_says_what_it_can(tmp_path):
    run = write(tmp_path / "run", host_state(3), about=None)
    (run / "checkpoints" / "3" / "state" / "checksums.json").unlink()
    found = inspect(find(str(run), 3))
    assert found["mesh"] == {"fsdp": 8}
    assert "saved by an earlier version" in text(found)
    (run / "checkpoints" / "3" / "_CHECKPOINT_METADATA").write_text("{")
    (run / "checkpoints" / "3" / "state" / "_sharding").write_text("{")
    found = inspect(find(str(run), 3))
    assert (found["saved"], found["mesh"]) == ("", {})
    assert "saved at a time unknown" in text(found)


def test_a_damaged_one_is_told(run):
    (run / "checkpoints" / "20" / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(DamagedCheckpoint, match="/20 is damaged"):
        inspect(find(str(run), 20))
    assert [bool(line["problem"]) for line in inspect(find(str(run)))["steps"]] == [False, True, False]


def test_without_any(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert text(inspect(find(str(tmp_path)))) == f"{tmp_path / 'checkpoints'}: 0 checkpoints"
