"""`load_run`: any run, on any mesh; what cannot be loaded is told."""

import shutil
import time

import numpy as np
import pytest
from spmdkit.checkpoints.damage import CheckpointError, DamagedCheckpoint
from spmdkit.configs import ConfigError, load_config
from spmdkit.mesh.errors import UserError
from spmdkit.runtime.build_run import build
from spmdkit.runtime.loading import load_run as load_module
from spmdkit.runtime.loading.find_run import find_run
from spmdkit.runtime.provenance import provenance_of, to_json
from support.faults import damage
from support.runs import assert_same_arrays, leave_run, listing, saved_params, whole, write_config, write_staged_config

import spmdkit


def sizes(run):
    mesh = run.layouts.mesh
    return {name: mesh.axis_size(name) for name in mesh.axis_names if mesh.axis_size(name) > 1}


def test_a_run_with_all_there_is_of_it(untrained, folder):
    before = listing(folder)
    run = spmdkit.load_run(folder)
    assert (run.step, run.model.name, run.folder, run.checkpoint) == (8, "mlp", folder, folder / "checkpoints" / "8")
    assert list(run.config.model["widths"]) == [32]
    assert_same_arrays(whole(run.params), saved_params(untrained, 8))
    assert sizes(run) == {"data": 2, "fsdp": 4}
    kernel = run.params["layers"][0]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 32)
    assert repr(run) == f"<{folder} at step 8: mlp, 2,410 parameters; mesh data 2 x fsdp 4>"
    assert (run.vocabulary, run.writes_text) == (None, False)
    assert listing(folder) == before


@pytest.mark.parametrize("mesh", [{}, {"fsdp": {"size": 8, "floor_bytes": 64}}, {"data": 3}])
def test_on_any_mesh(mesh, untrained, folder):
    run = spmdkit.load_run(str(folder), step=4, mesh=mesh)
    assert run.step == 4
    assert sizes(run) == {axis: size["size"] if axis == "fsdp" else size for axis, size in mesh.items()}
    assert_same_arrays(whole(run.params), saved_params(untrained, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "found"),
    [
        (None, {"pipe": 2, "data": 4}),
        ({}, {}),
        ({"pipe": 2}, {"pipe": 2}),
        ({"tensor": 2, "fsdp": {"size": 4, "floor_bytes": 64}}, {"tensor": 2, "fsdp": 4}),
    ],
)
def test_stages_load_on_every_mesh(mesh, found, staged):
    """Those of the run store blocks in another order than the model's."""
    run = spmdkit.load_run(staged.parent / "run", mesh=mesh)
    assert sizes(run) == found
    assert_same_arrays(whole(run.params), saved_params(staged, 4, "strategy={data: 8}"))


@pytest.mark.slow
def test_averages_of_stages_load_too(tmp_path):
    """At first they are the parameters, and they are stored in the order of the stages as these are."""
    path = write_staged_config(tmp_path, optimizer={"ema": {"decay": 0.9}})
    leave_run(path, steps=(4,))
    run = spmdkit.load_run(tmp_path / "run", mesh={}, ema=True)
    assert_same_arrays(whole(run.params), saved_params(path, 4, "strategy={data: 8}"))


@pytest.mark.slow
def test_the_data_need_not_be_there(staged):
    """The checkpoint says what sizes the data gave the model."""
    run = spmdkit.load_run(staged.parent / "run", mesh={}, changes=["data.files=[nowhere/*.txt]"])
    assert (run.vocabulary, run.writes_text) == (256, True)
    with pytest.raises(UserError, match=r"data\.files"):
        _ = run.splits


def test_changes_are_laid_over_the_config(folder):
    run = spmdkit.load_run(folder, changes=["train.global_batch=20", "strategy={fsdp: 8}"], mesh={"data": 4})
    assert (run.config.train.global_batch, run.batch_rows) == (20, 20)
    with pytest.raises(ConfigError, match=r"train\.gobal_batch is not a valid key\. Did you mean train\.global_batch"):
        spmdkit.load_run(folder, changes=["train.gobal_batch=20"])
    with pytest.raises(CheckpointError, match=r"params/layers/0/kernel: float32\[64, 32\] in the checkpoint"):
        spmdkit.load_run(folder, changes=["model.widths=[48]"])


def test_other_files_are_evaluated_whole(folder, tmp_path):
    place = load_module.find_run(folder)
    base = ["data.source=arrays", f"data.files=[{tmp_path}/new.npz]"]
    assert load_module.read_config(place, base).data.eval_files == (f"{tmp_path}/new.npz",)
    assert load_module.read_config(place, [*base, "data.eval_fraction=0.5"]).data.eval_files == ()
    other = [*base, "data.eval_files=[b.npz]"]
    assert load_module.read_config(place, other).data.eval_files[0].endswith("b.npz")


def test_a_damaged_checkpoint_names_the_others(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "run")
    damage(copied / "checkpoints" / "8", "flip")
    with pytest.raises(DamagedCheckpoint, match=r"8 is damaged: .* There are others, of the steps 4: .* step=4 "):
        spmdkit.load_run(copied)
    assert spmdkit.load_run(copied, step=4).step == 4


def test_a_checkpoint_that_the_run_removes_is_told(folder, tmp_path, monkeypatch):
    copied = shutil.copytree(folder, tmp_path / "run")

    def built(place, stored, *rest, **options):
        shutil.rmtree(stored.folder)
        raise DamagedCheckpoint("a file is missing")

    monkeypatch.setattr(load_module, "LoadedRun", built)
    with pytest.raises(CheckpointError, match=r"was removed while it was read: its run goes on, and keeps the latest"):
        spmdkit.load_run(copied)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        {"data": {"size": 8, "zero": 2, "floor_bytes": 64}},
        {"data": {"size": 2, "local_steps": 2}, "fsdp": {"size": 4, "floor_bytes": 64}},
        {"data": {"size": 8, "compress": "int8"}},
    ],
)
def test_what_only_training_needs_is_not_read(strategy, tmp_path):
    config = write_config(tmp_path, strategy=strategy)
    folder = leave_run(config, steps=(4,))
    losses = []
    for mesh in (None, {}):
        run = spmdkit.load_run(folder, mesh=mesh)
        assert_same_arrays(whole(run.params), saved_params(config, 4))
        losses.append(run.evaluate(max_batches=2)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


OWN = """
import jax.numpy as jnp
from spmdkit.parallel import Model

def linear():
    def loss(params, batch, key):
        errors = batch["inputs"] @ params["w"] - batch["targets"]
        return (errors**2 * batch["weights"]).sum(), batch["weights"].sum()
    return Model(init=lambda key: {"w": jnp.ones(64)}, loss=loss, name="linear")
"""


@pytest.mark.slow
def test_a_model_whose_source_has_changed_is_told(tmp_path):
    (tmp_path / "finished_own.py").write_text(OWN)
    config = write_config(tmp_path, model={"name": "finished_own:linear"})
    folder = leave_run(config, steps=(4,))
    (folder / "provenance.json").write_text(to_json(provenance_of(build(load_config(config)))))
    assert np.asarray(spmdkit.load_run(folder).params["w"]).shape == (64,)
    (tmp_path / "finished_own.py").write_text(OWN.replace("errors**2", "errors**4"))
    with pytest.warns(UserWarning, match=r"finished_own\.py has changed since this run was made, and may compute"):
        spmdkit.load_run(folder)


def test_simulated_devices_as_the_run_had(monkeypatch, folder):
    """Before JAX has opened any."""
    simulated = []
    monkeypatch.setattr(load_module, "backend_started", lambda: False)
    monkeypatch.setattr(load_module, "prepare_devices", lambda run, precision, simulate: simulated.append(run.simulate))
    spmdkit.load_run(folder)
    spmdkit.load_run(folder, changes=["run.simulate=0"], mesh={})
    with pytest.raises(UserError, match=r"The mesh fsdp 16 does not fit 8 devices of 1 process"):
        spmdkit.load_run(folder, mesh={"fsdp": 16})
    monkeypatch.setattr(load_module, "backend_started", lambda: True)
    spmdkit.load_run(folder)
    assert simulated == [8, 0, 16, 0], "open devices stay as they are"


def test_loads_a_run_that_is_reached_through_its_parent(folder, monkeypatch):
    monkeypatch.chdir(folder / "checkpoints")
    run = spmdkit.load_run("..")
    assert run.folder == folder
    np.testing.assert_equal(whole(run.params), whole(spmdkit.load_run(folder).params))


@pytest.fixture
def second_of_two(monkeypatch):
    """This process is rank 1, and rank 0 says what the list holds."""
    told: list[str] = []
    monkeypatch.setattr(load_module.jax, "process_count", lambda: 2)
    monkeypatch.setattr(load_module.jax, "process_index", lambda: 1)
    monkeypatch.setattr(load_module, "broadcast_text", lambda name, text, seconds: told.pop(0))
    return told


def test_what_is_not_seen_here_is_told(second_of_two, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(load_module, "SEE_SECONDS", 0.1)
    second_of_two += ["4", "12", ""]
    copied = shutil.copytree(folder, tmp_path / "run")
    place = find_run(copied)
    assert load_module.agree_on_checkpoint(place, 1) == copied / "checkpoints" / "4"
    with pytest.raises(CheckpointError, match=r"Rank 0 loads the checkpoint .*/checkpoints/12, and rank 1 sees none"):
        load_module.agree_on_checkpoint(place, 1)
    with pytest.raises(CheckpointError, match=r"No complete checkpoint in .*, as rank 0 sees it"):
        load_module.agree_on_checkpoint(place, 1)


def test_waits_for_a_checkpoint_that_appears_late(second_of_two, folder, tmp_path, monkeypatch):
    second_of_two.append("12")
    copied = shutil.copytree(folder, tmp_path / "run") / "checkpoints" / "12"
    monkeypatch.setattr(time, "sleep", lambda seconds: copied.mkdir())
    assert load_module.agree_on_checkpoint(find_run(tmp_path / "run"), 1) == copied
