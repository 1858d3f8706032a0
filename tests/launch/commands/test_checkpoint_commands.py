"""`spmdkit checkpoint` and `export` from the command line."""

import json
import shutil

import numpy as np
from spmdkit.checkpoints import export as export_file
from spmdkit.launch.cli import main
from spmdkit.launch.commands.checkpoint_commands import KINDS, LORA
from support.faults import damage

import spmdkit


def test_inspects_a_run_and_a_step(untrained, cli):
    run = untrained.parent / "run"
    printed = cli(0, "checkpoint", "inspect", run).out
    assert "2 checkpoints, newest step 8" in printed
    assert "saved on the mesh data 2 x fsdp 4" in printed
    assert "saved by spmdkit " in printed
    found = json.loads(cli(0, "checkpoint", "inspect", run, "--step", "4", "--json").out)
    assert (found["step"], found["about"]["strategy"]["fsdp"]["size"]) == (4, 4)


def test_verify_exits_with_2_for_a_corrupt_checkpoint(untrained, tmp_path, cli):
    run = shutil.copytree(untrained.parent / "run", tmp_path / "run")
    assert cli(0, "checkpoint", "verify", run).out.splitlines()[-1] == "2 checkpoints verified"
    damage(run / "checkpoints" / "8", "flip")
    printed = cli(2, "checkpoint", "verify", run).out
    assert "checkpoints/8: DAMAGED" in printed
    assert "1 of 2 checkpoints damaged: 8. " in printed
    cli(0, "checkpoint", "verify", run, "--step", "4")
    found = json.loads(cli(2, "checkpoint", "verify", run, "--json").out)
    assert [each["whole"] for each in found] == [True, False]


def test_exports_a_step(untrained, tmp_path, cli):
    words = [str(untrained.parent / "run"), str(tmp_path / "model"), "--to", "npy", "--step", "4"]
    assert cli(0, "export", *words).out == f"Wrote {tmp_path / 'model'}: 4 arrays, 9.4 KiB.\n"
    run = spmdkit.load_run(untrained.parent / "run", step=4, mesh={})
    kernel = np.load(tmp_path / "model" / "layers/0/kernel.npy")
    np.testing.assert_array_equal(kernel, run.params["layers"][0]["kernel"])


def test_averages_of_a_run_without_them_are_an_error(untrained, tmp_path, cli):
    error = cli(2, "export", untrained.parent / "run", tmp_path / "model.safetensors", "--ema").err
    assert "optimizer.ema" in error
    assert not list(tmp_path.iterdir())


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
