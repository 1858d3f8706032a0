"""A checkpoint of a real run fits the configs that could go on from it, and no others."""

import subprocess
import sys

import pytest
from runs import environment, write_config, write_language_config
from spmdkit.configs import load_config
from spmdkit.launch.cli import main
from spmdkit.launch.inspection.finding import find
from spmdkit.launch.inspection.fits import abstract_arrays, check_fits
from spmdkit.launch.inspection.stored import StoredCheckpoint
from spmdkit.training.checkpointing.errors import CheckpointError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The config of a run of 4 steps."""
    train = {"steps": 4, "global_batch": 16}
    config = write_config(tmp_path_factory.mktemp("fits"), checkpoint={"every": 4}, train=train)
    assert main(["train", str(config)]) == 0
    return config


def check(config, *overrides):
    return check_fits(StoredCheckpoint(find(str(config.parent / "run")).one), load_config(config, overrides))


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        (None, {"data": 2, "fsdp": 4}),
        ("strategy={data: 3}", {"data": 3}),
        ("strategy={data: -1}", {"data": 8}),
        ("strategy={fsdp: {size: 32, floor_bytes: 64}}", {"fsdp": 32}),
    ],
)
def test_any_mesh_fits(config, strategy, mesh):
    overrides = [strategy, "run.simulate=0", "train.global_batch=192"] if strategy else []
    found = check(config, *overrides)
    assert found["restored_on"] == mesh
    assert found["saved_on"] == {"data": 2, "fsdp": 4}


def test_all_that_differs_is_named(config):
    with pytest.raises(CheckpointError) as raised:
        check(config, "model.widths=[48]", "optimizer.name=sgd")
    message = str(raised.value)
    assert "does not fit the state of this run" in message
    assert "params/layers/0/kernel: float32[64, 32] in the checkpoint, float32[64, 48] in this run" in message
    assert "opt_state/0/nu/layers/0/kernel: only in the checkpoint" in message
    assert raised.value.exit_code == 2


def test_groups_of_local_steps_have_arrays_of_their_own(config):
    with pytest.raises(CheckpointError, match=r"strategy\.data as well, if it has local_steps"):
        check(config, "strategy={data: {size: 2, local_steps: 2}}", "run.simulate=2")


def test_no_accelerator_is_opened(config):
    """JAX is told of a platform that does not exist."""
    code = f"""if True:
        from spmdkit.launch.cli import main
        assert main(["checkpoint", "fits", {str(config.parent / "run")!r}, {str(config)!r}]) == 0
    """
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(JAX_PLATFORMS="nowhere"), timeout=120)


def test_the_arrays_are_those_of_a_run(tmp_path):
    """Of a pipeline whose stages store blocks in another order, and pad them."""
    from spmdkit.launch.run.build import build
    from spmdkit.layouts.paths import leaves_with_paths
    from spmdkit.parallel.sharding.stored_order import stored_order

    strategy = {"pipe": {"size": 2, "schedule": "interleaved_1f1b", "virtual": 2, "microbatches": 4}, "data": 4}
    model = {"name": "transformer", "layers": 4, "width": 16, "heads": 2, "mlp_width": 32}
    loaded = load_config(write_language_config(tmp_path, strategy=strategy, model=model))
    built = build(loaded)
    expected = dict(leaves_with_paths(stored_order(built.layouts).abstract_model(built.step.abstract_state())))
    found, mesh = abstract_arrays(loaded)
    assert mesh == {"pipe": 2, "data": 4}
    assert found.keys() == expected.keys()
    assert all((found[path].shape, found[path].dtype) == (leaf.shape, leaf.dtype) for path, leaf in expected.items())
