"""Models that call `jax.shard_map` themselves, over an axis that the step leaves to XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import Model, build_step, lay_out
from support import toy

import spmdkit
from spmdkit import DeviceMesh, TensorLayout

RULES = {"up": [None, "tensor"], "down": ["tensor"]}


def init(key):
    return {"up": jax.random.normal(key, (8, 16)), "down": jnp.ones(16)}


def batch():
    return {"inputs": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}


def model(**mesh):
    """A layer cut by hand: columns of `up` and rows of `down` on each device, one sum."""
    whole, columns, rows = PartitionSpec(), PartitionSpec(None, "tensor"), PartitionSpec("tensor")

    def layer(x, up, down):
        return jax.lax.psum(jnp.tanh(x @ up) @ down, "tensor")

    def loss(params, batch, key):
        cut = jax.shard_map(layer, in_specs=(whole, columns, rows), out_specs=whole, **mesh)
        y = cut(batch["inputs"], params["up"], params["down"])
        return (y**2).sum(), jnp.float32(len(y))

    return Model(init=init, loss=loss)


def plain(params, batch, key):
    y = jnp.tanh(batch["inputs"] @ params["up"]) @ params["down"]
    return (y**2).sum(), jnp.float32(len(y))


MESHES = {"the step's": DeviceMesh.of(toy.devices(4), tensor=4), "its own": None}


@pytest.mark.parametrize("given", MESHES.values(), ids=MESHES)
def test_tensor_alone(given):
    own = jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    by_hand = model(mesh=given.backend_mesh if given else own)
    step = toy.build({"tensor": 4}, model=by_hand, rules=RULES)
    state = step.init(0)
    params = jax.device_get(state.params)
    (total, weight), expected = jax.jit(jax.value_and_grad(lambda p: plain(p, batch(), None), has_aux=True))(params)
    found, metrics = step.gradients(state, batch())
    assert toy.relative(metrics.loss, total / weight) < 1e-5
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: toy.relative(a, b / weight), found, expected))) < 1e-5
    assert toy.relative(step.evaluate(state.params, batch())[0], total) < 1e-5
    state, _ = step(state, batch())
    assert {shard.data.shape for shard in state.params["up"].addressable_shards} == {(8, 4)}


def test_nested_shard_map_is_one_message():
    by_hand = model(axis_names={"tensor"})
    step = toy.build({"data": 2, "tensor": 2}, model=by_hand, rules=RULES)
    with pytest.raises(UserError, match=r"calls jax.shard_map inside the step.*strategy: \{tensor: 8\} alone"):
        step(step.init(0), batch())
    with pytest.raises(UserError, match=r"calls jax.shard_map inside the step"):  # as the command line does
        step.compile(toy.abstract(batch()))


def test_distribute_tensor_inside_a_step_is_one_sentence():
    mesh = DeviceMesh.of(toy.devices(4), data=2, tensor=2)

    def loss(params, batch, key):
        x = spmdkit.distribute_tensor(batch["inputs"] @ params["up"], TensorLayout((None, "tensor"), mesh))
        return x.sum() * params["down"].sum(), 1.0

    constrained = Model(init=init, loss=loss)
    step = build_step(constrained, optax.sgd(0.1), lay_out(constrained, mesh, rules=RULES))
    with pytest.raises(UserError, match=r"inside a shard_map over data: .*spmdkit.name_output\(y, \"layer/output\"\)"):
        step(step.init(0), batch())
