"""`spmdkit checkpoint` and `export` from the command line."""

import json
import shutil

import numpy as np
import pytest
from spmdkit.checkpoints import export as export_file
from spmdkit.launch.cli import main
from spmdkit.launch.commands.checkpoint_commands import KINDS, LORA
from support.faults import damage
from support.runs import write_config

import spmdkit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The config of a run with checkpoints of steps 4, 8 and 12."""
    config = write_config(tmp_path_factory.mktemp("command"), checkpoint={"every": 4, "keep": 3})
    assert main(["train", str(config)]) == 0
    return config


@pytest.fixture
def run(config, tmp_path):
    return shutil.copytree(config.parent / "run", tmp_path / "run")


def test_inspect(run, cli):
    printed = cli(0, "checkpoint", "inspect", run)
    assert "3 checkpoints, newest step 12" in printed.out
    assert "saved on the mesh data 2 x fsdp 4" in printed.out
    assert "saved by spmdkit " in printed.out
    printed = cli(0, "checkpoint", "inspect", run, "--step", "8", "--json")
    assert json.loads(printed.out)["about"]["strategy"]["fsdp"]["size"] == 4
    assert json.loads(printed.out)["step"] == 8


def test_verify_exits_with_2_for_a_corrupt_checkpoint(run, cli):
    assert cli(0, "checkpoint", "verify", run).out.splitlines()[-1] == "3 checkpoints verified"
    damage(run / "checkpoints" / "8", "flip")
    printed = cli(2, "checkpoint", "verify", run)
    assert "checkpoints/8: DAMAGED" in printed.out
    assert "1 of 3 checkpoints damaged: 8. " in printed.out
    cli(0, "checkpoint", "verify", run, "--step", "4")
    found = json.loads(cli(2, "checkpoint", "verify", run, "--json").out)
    assert [each["whole"] for each in found] == [True, False, True]


def test_exports_a_step(untrained, tmp_path, cli):
    words = [str(untrained.parent / "run"), str(tmp_path / "model"), "--to", "npy", "--step", "4"]
    assert cli(0, "export", *words).out == f"Wrote {tmp_path / 'model'}: 4 arrays, 9.4 KiB.\n"
    run = spmdkit.load_run(untrained.parent / "run", step=4, mesh={})
    kernel = np.load(tmp_path / "model" / "layers/0/kernel.npy")
    np.testing.assert_array_equal(kernel, run.params["layers"][0]["kernel"])


def test_accepts_overrides_only_with_a_config(untrained, tmp_path, cli):
    run = untrained.parent / "run"
    assert main(["export", str(untrained), str(tmp_path / "model.safetensors"), f"run.dir={run}"]) == 0
    assert "sets run.dir=" in cli(2, "export", untrained, tmp_path / "b.safetensors", f"run.dir={tmp_path}/none").err
    for extra in (["b.safetensors", "run.simulate=0"], ["model.safetensors"]):  # such as a name with a space
        assert f"takes RUN and FILE, got also {extra[0]!r}" in cli(2, "export", run, tmp_path / "my", *extra).err
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_choices_contain_every_kind():
    assert set(KINDS) == set(export_file.KINDS)
    assert LORA == export_file.ADAPTERS
