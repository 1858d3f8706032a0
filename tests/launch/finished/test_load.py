"""`load_run`: any run, on any mesh; what cannot be loaded is told."""

import shutil

import jax
import numpy as np
import pytest
from runs import listing, write_config, write_language_config
from small_checkpoints import damage
from small_runs import first_params, leave_run, whole
from spmdkit.configs import ConfigError, load_config
from spmdkit.launch.finished import load as load_module
from spmdkit.launch.inspection.stored import StoredCheckpoint
from spmdkit.launch.run.build import build
from spmdkit.launch.run.directory.provenance import as_json, provenance
from spmdkit.mesh.errors import UserError
from spmdkit.training.checkpointing.errors import CheckpointError, DamagedCheckpoint

import spmdkit


def sizes(run):
    mesh = run.layouts.mesh
    return {name: mesh.axis_size(name) for name in mesh.axis_names if mesh.axis_size(name) > 1}


def assert_params(run, expected):
    found = whole(run.params)
    assert found.keys() == expected.keys()
    assert [path for path in expected if found[path].tobytes() != expected[path].tobytes()] == []


def test_a_run_with_all_there_is_of_it(config, folder):
    before = listing(folder)
    run = spmdkit.load_run(folder)
    assert (run.step, run.model.name, run.folder, run.checkpoint) == (8, "mlp", folder, folder / "checkpoints" / "8")
    assert list(run.config.model["widths"]) == [32]
    assert_params(run, first_params(config, 8))
    assert sizes(run) == {"data": 2, "fsdp": 4}
    kernel = run.params["layers"][0]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 32)
    assert repr(run) == f"<{folder} at step 8: mlp, 2,410 parameters; mesh data 2 x fsdp 4>"
    assert (run.vocabulary, run.writes_text) == (None, False)
    assert listing(folder) == before


@pytest.mark.parametrize("mesh", [{}, {"fsdp": {"size": 8, "floor_bytes": 64}}, {"data": 3}])
def test_on_any_mesh(mesh, config, folder):
    run = spmdkit.load_run(str(folder), step=4, mesh=mesh)
    assert run.step == 4
    assert sizes(run) == {axis: size["size"] if axis == "fsdp" else size for axis, size in mesh.items()}
    assert_params(run, first_params(config, 4))


def test_a_checkpoint_that_does_not_say_it_asks_the_data(config, folder, monkeypatch):
    about = StoredCheckpoint(folder / "checkpoints" / "8").about
    older = {name: value for name, value in about.items() if name != "data"}
    monkeypatch.setattr(StoredCheckpoint, "about", property(lambda self: older))
    assert_params(spmdkit.load_run(folder), first_params(config, 8))


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
    assert_params(run, first_params(staged, 4, "strategy={data: 8}"))


@pytest.mark.slow
def test_averages_of_stages_load_too(tmp_path):
    """At first they are the parameters, and they are stored in the order of the stages as these are."""
    model = {"name": "transformer", "layers": 4, "width": 16, "heads": 2, "mlp_width": 32}
    pipe = {"size": 2, "schedule": "interleaved_1f1b", "virtual": 2, "microbatches": 4}
    path = write_language_config(
        tmp_path, strategy={"pipe": pipe, "data": 4}, model=model, optimizer={"ema": {"decay": 0.9}}
    )
    leave_run(path, steps=(4,))
    run = spmdkit.load_run(tmp_path / "run", mesh={}, ema=True)
    assert_params(run, first_params(path, 4, "strategy={data: 8}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "found"), [(1, {}), (2, {"fsdp": 2}), (3, {"fsdp": 3}), (4, {"fsdp": 2, "data": 2})]
)
def test_the_own_strategy_is_fitted_to_the_devices(devices, found, staged, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    run = spmdkit.load_run(staged.parent / "run", changes=["strategy.pipe={size: 2, microbatches: 4}"])
    assert sizes(run) == found
    assert run.layouts.pipeline is None


@pytest.mark.slow
def test_a_floor_that_no_parameter_reaches_is_dropped(staged, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    changes = ["strategy={pipe: 4, fsdp: {size: 2, floor_bytes: 1MiB}}"]
    run = spmdkit.load_run(staged.parent / "run", changes=changes)
    assert sizes(run) == {"fsdp": 4}
    assert "no floor is used" in str(run.layouts.table)


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
    with pytest.raises(ConfigError, match=r"train\.gobal_batch is not a key\. Did you mean train\.global_batch\?"):
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
    damage(copied / "checkpoints" / "8")
    with pytest.raises(
        DamagedCheckpoint, match=r"8 is damaged: .* There are others, of the steps 4: load one with step=4 "
    ):
        spmdkit.load_run(copied)
    assert spmdkit.load_run(copied, step=4).step == 4


def test_the_newest_of_a_run_that_goes_on(folder, tmp_path, monkeypatch):
    """The run saves a newer checkpoint and removes this one while it is read."""
    copied = shutil.copytree(folder, tmp_path / "run")
    before = load_module._built

    def built(place, stored, *rest, **options):
        if stored.folder.name == "8":
            shutil.copytree(stored.folder, copied / "checkpoints" / "12")
            shutil.rmtree(stored.folder)
            raise DamagedCheckpoint("a file is missing")
        return before(place, stored, *rest, **options)

    monkeypatch.setattr(load_module, "_built", built)
    assert spmdkit.load_run(copied).checkpoint.name == "12"
    shutil.copytree(copied / "checkpoints" / "12", copied / "checkpoints" / "8")
    shutil.rmtree(copied / "checkpoints" / "12")
    with pytest.raises(CheckpointError, match=r"was removed while it was read: its run goes on, and keeps the newest"):
        spmdkit.load_run(copied, step=8)


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
        assert_params(run, first_params(config, 4))
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
    (folder / "provenance.json").write_text(as_json(provenance(build(load_config(config)))))
    assert np.asarray(spmdkit.load_run(folder).params["w"]).shape == (64,)
    (tmp_path / "finished_own.py").write_text(OWN.replace("errors**2", "errors**4"))
    with pytest.warns(UserWarning, match=r"finished_own\.py has changed since the run in .* was made, and may compute"):
        spmdkit.load_run(folder)


def test_simulated_devices_as_the_run_had(monkeypatch, folder):
    """Before JAX has opened any."""
    simulated = []
    monkeypatch.setattr(load_module, "backend_started", lambda: False)
    monkeypatch.setattr(load_module, "prepare_devices", lambda config: simulated.append(config.run.simulate))
    spmdkit.load_run(folder)
    spmdkit.load_run(folder, changes=["run.simulate=0"], mesh={})
    with pytest.raises(UserError, match=r"The mesh fsdp 16 needs 16 devices, and there are 8"):
        spmdkit.load_run(folder, mesh={"fsdp": 16})
    assert simulated == [8, 0, 16]


def test_loads_a_run_that_is_reached_through_its_parent(folder, monkeypatch):
    monkeypatch.chdir(folder / "checkpoints")
    run = spmdkit.load_run("..")
    assert run.folder == folder
    np.testing.assert_equal(whole(run.params), whole(spmdkit.load_run(folder).params))
