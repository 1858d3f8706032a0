"""The examples of Keras's documentation, with `spmdkit` in the place of `keras.distribution`.

A Keras model becomes a pytree of arrays whose paths are those of the variables, and `fit` some jitted steps of SGD.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.layouts.paths import map_with_path

import spmdkit

STEPS = 5


@pytest.fixture(autouse=True)
def clear_distribution():
    """Each example starts and ends without a distribution."""
    yield
    spmdkit.set_distribution(None)


def init(key) -> dict:
    """Two dense layers, d1 and d2."""
    first, second = jax.random.split(key)
    return {
        "d1": {"kernel": jax.random.normal(first, (8, 16)), "bias": jnp.zeros(16)},
        "d2": {"kernel": jax.random.normal(second, (16, 4)), "bias": jnp.zeros(4)},
    }


def dense(params: dict, x, name: str):
    """A layer that asks the distribution for the layout of its output, as Keras layers do."""
    y = x @ params[name]["kernel"] + params[name]["bias"][None]
    current = spmdkit.distribution()
    layout = None if current is None else current.get_tensor_layout(f"{name}/output")
    return y if layout is None else spmdkit.distribute_tensor(y, layout)


def loss(params: dict, x):
    return jnp.mean(dense(params, jax.nn.relu(dense(params, x, "d1")), "d2") ** 2)


def sgd(params: dict, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda param, gradient: param - 0.01 * gradient, params, gradients), value


def fit() -> tuple[dict, list[float]]:
    """Trains under the process's distribution; gives the parameters and the losses."""
    current = spmdkit.distribution()
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    params = init(jax.random.key(0))
    if current is not None:
        x = spmdkit.distribute_tensor(x, current.get_data_layout(x.shape))
        layouts = map_with_path(lambda path, leaf: current.get_variable_layout(leaf, path), params)
        params = jax.tree.map(spmdkit.distribute_tensor, params, layouts)
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, params)  # state stays as it lies, as in Keras's trainer
    step = jax.jit(sgd, out_shardings=(state_shardings, None))
    losses = []
    for _ in range(STEPS):
        params, value = step(params, x)
        losses.append(float(value))
    return params, losses


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    """The losses without a distribution."""
    spmdkit.set_distribution(None)
    return fit()[1]


def shard_shapes(array) -> set[tuple[int, ...]]:
    return {shard.data.shape for shard in array.addressable_shards}


# The guide "Distributed training": meshes and layouts


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: {"devices": spmdkit.list_devices("cpu")},
        lambda: {"device_mesh": spmdkit.DeviceMesh((8,), ["data"], spmdkit.list_devices())},
    ],
)
def test_guide_data_parallel(one_device, arguments):
    with spmdkit.DataParallel(**arguments()).scope():
        params, losses = fit()
    assert spmdkit.distribution() is None
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(params))
    np.testing.assert_allclose(losses, one_device, rtol=1e-5)


def test_guide_model_parallel(one_device):
    mesh_2d = spmdkit.DeviceMesh(shape=(2, 4), axis_names=["data", "model"], devices=spmdkit.list_devices())
    layout_map = spmdkit.LayoutMap(mesh_2d)
    layout_map["d1/kernel"] = (None, "model")
    layout_map["d1/bias"] = ("model",)
    layout_map["d2/output"] = ("data", None)
    model_parallel = spmdkit.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    spmdkit.set_distribution(model_parallel)
    params, losses = fit()
    assert shard_shapes(params["d1"]["kernel"]) == {(8, 4)}
    assert shard_shapes(params["d1"]["bias"]) == {(4,)}
    assert shard_shapes(params["d2"]["kernel"]) == {(16, 4)}  # no rule
    np.testing.assert_allclose(losses, one_device, rtol=1e-5)
