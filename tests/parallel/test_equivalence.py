"""The promise: on every mesh of data x fsdp, training is the training of one device. One table, no row skipped."""

from functools import cache

import jax
import numpy as np
import optax
import pytest
import toy

from spmdkit.models.mlp import MLPConfig, mlp
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import FSDPConfig, Precision, build_step, census, lay_out

MESHES = [(data, fsdp) for data in (1, 2, 4, 8) for fsdp in (1, 2, 4, 8) if data * fsdp <= 8]
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
STEPS, ROWS, LENGTH, FEATURES, CLASSES = 10, 8, 8, 8, 8
FLOOR = 256

MODELS = {
    "transformer": transformer(
        TransformerConfig(vocabulary=32, length=LENGTH, layers=2, width=16, heads=4, kv_heads=2, mlp_width=32)
    ),
    "mlp": mlp(MLPConfig(inputs=FEATURES, hidden=(16, 16), classes=CLASSES)),
}


def optimizer():
    return optax.adamw(1e-3, weight_decay=0.1)


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
def one_device(kind, dtype):
    """Loss, gradients and parameters by plain JAX: no mesh, no runtime, the mean and clipping written out."""
    model = MODELS[kind]
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.init(jax.random.key(0)))

    def mean(params, batch):
        total, weight = model.loss(params, batch, None)
        return total / weight

    differentiate = jax.jit(jax.value_and_grad(mean))
    chain = optax.chain(optax.clip_by_global_norm(1.0), optimizer())
    state, first = chain.init(params), None
    for batch in batches(kind):
        loss, gradients = differentiate(params, batch)
        first = first if first is not None else (loss, gradients)
        updates, state = chain.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
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
    step = build_step(MODELS[kind], optimizer(), layouts, clip_norm=1e9, precision=precision)
    state = step.init(0)
    assert_really_on(state, layouts, data, fsdp)
    loss, gradients, params = one_device(kind, dtype)

    ours, metrics = step.gradients(state, batches(kind)[0])
    assert toy.relative(metrics.loss, loss) < TOLERANCE[dtype]
    assert worst(ours, gradients) < (TOLERANCE[dtype],)

    step = build_step(MODELS[kind], optimizer(), layouts, clip_norm=1.0, precision=precision)
    for batch in batches(kind):
        state, _ = step(state, batch)
    assert worst(state.params, params) < (TOLERANCE[dtype],)
    compiled = step.lower(toy.abstract(batches(kind)[0])).compile()
    assert census(compiled.as_text(), layouts.mesh) == step.cost()


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
