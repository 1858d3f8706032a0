import json

from runs import write_config
from spmdkit.configs import load_config
from spmdkit.launch.run.build import build
from spmdkit.launch.run.directory.saved_with import saved_with


def test_a_checkpoint_says_what_saved_it(tmp_path, monkeypatch):
    import spmdkit

    built = build(load_config(write_config(tmp_path)))
    found = saved_with(built)
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["spmdkit"] == spmdkit.__version__
    assert found["mesh"] == {"data": 2, "fsdp": 4}
    assert (found["devices"], found["processes"]) == (8, 1)
    assert found["strategy"]["fsdp"]["floor_bytes"] == 256
    assert found["parameters"] == 64 * 32 + 32 + 32 * 10 + 10
    assert found["precision"]["params"] == "float32"
    assert found["data"] == {"features": 64, "length": 256}
    assert (found["library"], found["lora_scale"]) == ("", None)


def test_what_an_export_needs_to_know(tmp_path):
    model = {"name": "mlp", "classes": 10, "widths": [32], "lora": {"rank": 2, "alpha": 3, "match": ["layers/0/.*"]}}
    assert saved_with(build(load_config(write_config(tmp_path, model=model))))["lora_scale"] == 1.5
