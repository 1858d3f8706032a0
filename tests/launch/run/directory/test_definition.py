"""The user's own model and optimizer: which files they are, and that another process finds the same."""

import json
import subprocess
import sys
from pathlib import Path

from runs import environment
from user_code import made_of


def test_the_users_own_files_are_those_beside_the_module_that_it_imports(config):
    found = made_of(config)
    assert {name: Path(path).name for name, (path, _) in found.model.files.items()} == {
        "layers_of_mine": "layers_of_mine.py",
        "model_of_mine": "model_of_mine.py",
    }
    assert list(found.optimizer.files) == ["optimizer_of_mine"]
    assert len(found.model.program) == len(found.optimizer.program) == 16


def test_the_same_source_gives_the_same_in_another_process(config):
    code = """if True:
        import sys
        sys.path.insert(0, sys.argv[2])
        from spmdkit.configs import load_config
        from spmdkit.launch.run.build import build, prepare_devices
        from spmdkit.launch.run.directory.provenance import as_json, provenance
        config = load_config(sys.argv[1], sys.argv[3:])
        prepare_devices(config)
        print(as_json(provenance(build(config))))
    """
    changed = ["strategy={fsdp: {size: 4, floor_bytes: 64}}", "run.simulate=4", "train.accumulate=2"]
    command = [sys.executable, "-c", code, str(config), str(config.parent), *changed, "precision.compute=bfloat16"]
    ended = subprocess.run(command, env=environment(PYTHONHASHSEED="7"), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    other, here = json.loads(ended.stdout), made_of(config)
    assert other["fingerprint"] == here.fingerprint
    assert other["model"]["program"] == here.model.program
    assert other["optimizer"]["program"] == here.optimizer.program
    assert other["model"]["files"] == {name: list(file) for name, file in here.model.files.items()}
