"""The promise: on every mesh of data x fsdp, training is the training of one device. One table, no row skipped."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from spmdkit.models.mlp import MLPConfig, mlp
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import FSDPConfig, Precision, TrainState, build_step, census, lay_out

MESHES = [(data, fsdp) for data in (1, 2, 4, 8) for fsdp in (1, 2, 4, 8) if data * fsdp <= 8]
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
STEPS, ROWS, LENGTH, FEATURES, CLASSES = 10, 8, 8, 8, 8
FLOOR = 256
CLIP = 0.5

MODELS = {
    "transformer": transformer(
        TransformerConfig(vocabulary=32, length=LENGTH, layers=2, width=16, heads=4, kv_heads=2, mlp_width=32)
    ),
    "mlp": mlp(MLPConfig(features=FEATURES, widths=(16, 16), classes=CLASSES)),
}


class Recorded(NamedTuple):
    """The gradients a step used, left in the optimizer's state in their parameters' layouts."""

    gradients: Any


def optimizer():
    """AdamW that keeps the gradients it was given, so that one compiled step shows them too."""
    record = optax.GradientTransformation(
        lambda params: Recorded(jax.tree.map(jnp.zeros_like, params)),
        lambda grads, _, params=None: (grads, Recorded(grads)),
    )
    return optax.chain(record, optax.adamw(1e-3, weight_decay=0.1))


@cache
def batches(kind):
    """Ten batches whose weights are ragged."""
    random = np.random.default_rng(1)
    made = []
    for _ in range(STEPS):
        rows = (ROWS, LENGTH) if kind == "transformer" else (ROWS,)
        inputs = random.integers(0, 32, rows) if kind == "transformer" else random.normal(size=(ROWS, FEATURES))
        made.append(
            {
                "inputs": inputs.astype(np.int32 if kind == "transformer" else np.float32),
                "targets": random.integers(0, CLASSES, rows).astype(np.int32),
                "weights": (random.random(rows) < 0.7).astype(np.float32),
                "example": np.arange(ROWS, dtype=np.int32),
            }
        )
    return made


@cache
def initial(kind, dtype):
    """The parameters that every run begins with, on the host: steps consume what they are given."""
    params = jax.jit(MODELS[kind].init)(jax.random.key(0))
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params)


@cache
def one_device(kind, dtype):
    """First loss, first gradients and last parameters by plain JAX: no mesh, no runtime."""

    def mean(params, batch):
        total, weight = MODELS[kind].loss(params, batch, None)
        return total / weight

    chain = optax.chain(optax.clip_by_global_norm(CLIP), optimizer())

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(mean)(params, batch)
        updates, state = chain.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = initial(kind, dtype)
    state, first = chain.init(params), None
    for batch in batches(kind):
        params, state, loss = step(params, state, batch)
        first = first or (loss, state[1][0].gradients)
    return *first, params


def worst(tree, reference):
    """The largest relative error of a leaf, and its path."""
    errors = jax.tree.leaves_with_path(jax.tree.map(toy.relative, tree, reference))
    return max((error, jax.tree_util.keystr(path)) for path, error in errors)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("data", "fsdp"), MESHES, ids=[f"data{data}-fsdp{fsdp}" for data, fsdp in MESHES])
@pytest.mark.parametrize("kind", list(MODELS))
def test_every_mesh_equals_one_device(request, kind, data, fsdp, dtype):
    if dtype == "float64":
        request.getfixturevalue("float64")
    precision = Precision(params=dtype, compute=dtype, reduce=dtype)
    strategy = {"data": data, "fsdp": FSDPConfig(size=fsdp, floor_bytes=FLOOR)}
    layouts = lay_out(MODELS[kind], strategy, devices=toy.devices(data * fsdp), precision=precision)
    step = build_step(MODELS[kind], optimizer(), layouts, clip_norm=CLIP, precision=precision)
    state = placed(step, initial(kind, dtype))
    assert_really_on(state, layouts, data, fsdp)
    loss, gradients, params = one_device(kind, dtype)

    for number, batch in enumerate(batches(kind)):
        state, metrics = step(state, batch)
        if number == 0:
            assert toy.relative(metrics.loss, loss) < TOLERANCE[dtype]
            assert worst(state.opt_state[0].gradients, gradients) < (TOLERANCE[dtype],)
    assert worst(state.params, params) < (TOLERANCE[dtype],)
    assert_really_on(state, layouts, data, fsdp)
    compiled = step.lower(toy.abstract(batches(kind)[0])).compile()
    assert census(compiled.as_text(), layouts.mesh) == step.cost()


def placed(step, params):
    """The first state with these parameters, laid out as the step wants it."""
    state = TrainState(jnp.zeros((), jnp.int32), params, step.optimizer.init(params), jnp.zeros(2, jnp.uint32))
    return jax.tree.map(lambda leaf, want: jax.device_put(leaf, want.sharding), state, step.abstract_state())


def assert_really_on(state, layouts, data, fsdp):
    """Every leaf is on all devices of the mesh asked for, and each shard has the shape that the strategy means."""
    assert (layouts.mesh.axis_size("data"), layouts.mesh.axis_size("fsdp")) == (data, fsdp)
    split = 0
    for row, leaf in zip(layouts.table.rows, jax.tree.leaves(state.params), strict=True):
        assert len(leaf.sharding.device_set) == data * fsdp
        stacked = row.path.startswith("blocks/")
        elements = int(np.prod(row.shape[1:] if stacked else row.shape))
        expected = list(row.shape)
        if fsdp > 1 and elements * leaf.dtype.itemsize >= FLOOR:
            dim = next(dim for dim in range(int(stacked), leaf.ndim) if row.shape[dim] % fsdp == 0)
            expected[dim] //= fsdp
            split += 1
        assert {shard.data.shape for shard in leaf.addressable_shards} == {tuple(expected)}, row.path
        replicas = {shard.replica_id for shard in leaf.addressable_shards}
        assert len(replicas) == data * fsdp * int(np.prod(expected)) // leaf.size
    assert (split > 0) == (fsdp > 1)
