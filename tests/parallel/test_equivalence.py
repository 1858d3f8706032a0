"""The promise: under every strategy, training is the training of one device. One table (`table.py`), no row skipped."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
import reference
from spmdkit.layouts.paths import map_with_path
from spmdkit.mesh.axes import AXES
from spmdkit.parallel import FSDPConfig, Precision, build_step, census, lay_out
from spmdkit.parallel.blocks.ends import separates_ends
from spmdkit.parallel.collectives import differing
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.pipeline import PipelineConfig
from spmdkit.parallel.sharding.stored_order import unstore_blocks
from spmdkit.parallel.xla import platform
from support import table, toy
from support.order import unordered
from support.pipelines import light
from support.rows import (
    SIZES,
    batches,
    differentiate,
    first_params,
    model,
    num_devices,
    optimizer,
    params_of,
    row_named,
    sizes_of,
    trained,
)

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
CLIP = 0.5


@cache
def one_device(training):
    """First loss and gradients, and last parameters by plain JAX and NumPy: no mesh, and nothing of the runtime.

    In float64 for rows of float32 as well. AdamW divides a gradient by its own size: where that is next to zero, one
    device in float32 is itself further than the tolerance from what is right.
    """
    first = None
    _, frozen = trained(training)
    with jax.enable_x64(True):
        start = jax.tree.map(np.float64, params_of(training))
        params = start
        adamw = reference.AdamW(params, rate=1e-3, decay=0.1)
        for number, batch in enumerate(batches(training.kind == "mlp")):
            key = jax.random.fold_in(jax.random.key(training.seed), number)
            (total, weight), sums = differentiate(training, params, batch, key)
            means = jax.tree.map(lambda leaf, weight=weight: np.asarray(leaf) / float(weight), sums)
            gradients, _ = reference.clip(means, CLIP)
            params = keep_frozen(frozen, start, adamw.update(params, gradients))
            first = first or (float(total / weight), gradients)
    return (*first, params)


def keep_frozen(frozen, start, params):
    """Parameters with those at some paths as they were at the start."""
    return map_with_path(lambda path, first, last: first if path in frozen else last, start, params)


def worst(tree, reference):
    """The largest relative error of a leaf, and its path."""
    errors = jax.tree.leaves_with_path(jax.tree.map(toy.relative, tree, reference))
    return max((error, jax.tree_util.keystr(path)) for path, error in errors)


@pytest.mark.table
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("row", table.ROWS, ids=[row.name for row in table.ROWS])
def test_every_row_equals_one_device(request, row, dtype):
    if dtype == "float64":
        request.getfixturevalue("float64")
    check(row, dtype)


DRAWN = [f"transformer-{name}" for name in ("fsdp8", "tensor8", "pipe8", "pipe2-fsdp2-tensor2")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DRAWN, "moe-pipe2-fsdp2-expert2", "zbv-4", "pipe-uneven"])
def test_first_parameters_are_the_bits_of_one_device(name):
    """Wherever a part of a parameter is drawn. Rows of the table start from given ones, which compile faster."""
    row = row_named(name)
    own = model(row.kind, row.layers)
    step = toy.build(row.strategy, model=own)
    found = natural(step.plan, step.init(seed=0).params)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), b), found, first_params(row.kind, row.layers))
    )


SOME = ("transformer-pipe2-fsdp2-tensor2", "moe-data2-expert2-context2", "zero2-size2", "zbv-2", "1f1b-recompute")


@pytest.mark.long_cases(*SOME[:3], SOME[-1])
@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_some_rows_of_the_table(name, float64):
    """With parameters that the mesh draws itself."""
    check(row_named(name), "float64", drawn=True)


@pytest.mark.table
@pytest.mark.parametrize("row", table.ROWS_OF_GPUS, ids=[row.name for row in table.ROWS_OF_GPUS])
def test_every_row_of_gpus_equals_one_device(row, float64):
    with platform.branches_of_gpus(across_hosts=row.branches == "hosts"):
        check(row, "float32" if row.branches == "hosts" else "float64")


ENDS = ("gpus-accumulate", "gpus-data-tensor-full-block-lora", "gpus-expert-tensor-full-block-part", "gpus-zbv-part")


@pytest.mark.long_cases(*ENDS[:1], *ENDS[2:])
@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_some_rows_of_gpus(name, float64):
    """Simulated devices run these forms of the step only in tests."""
    with platform.branches_of_gpus():
        check(row_named(name), "float64")


QUICK = {
    "recompute": ({"pipe": PipelineConfig(size=2, microbatches=4, recompute=True)}, "none"),
    "split backward": ({"pipe": PipelineConfig(size=2, schedule="zb_h1", microbatches=4)}, "none"),
    "prefetch": ({"fsdp": FSDPConfig(size=2, floor_bytes=table.FLOOR, prefetch=1)}, "none"),
    "ends": ({"fsdp": FSDPConfig(size=2, floor_bytes=table.FLOOR)}, "full"),
    "overlapped": ({"data": DataParallelConfig(size=2, reduce="overlapped")}, "none"),
}


def noisy_block(params, x, key):
    return toy.block(params, x, None) * jax.random.uniform(key, minval=0.5, maxval=1.5)


LIGHT, BATCH = replace(light(4), block=noisy_block), toy.batch(0)


@cache
def light_on_one_device():
    """Parameters, and the mean loss and its gradients."""
    return toy.on_one_device(LIGHT, BATCH, key=jax.random.fold_in(jax.random.key(0), 0))


@pytest.mark.parametrize("name", QUICK)
def test_gradients_of_a_light_model_equal_one_device(name):
    """Of 4 blocks, in the forms of the step that loop over them."""
    strategy, remat = QUICK[name]
    params, _, expected = light_on_one_device()
    with platform.branches_of_gpus():
        step = toy.build(strategy, model=LIGHT, remat=remat)
        assert separates_ends(LIGHT, step.plan) == (name == "ends")
        found, _ = step.gradients(step.init(0, params), BATCH)
    assert worst(natural(step.plan, found), expected) < (TOLERANCE["float32"],)


def check(row, dtype, *, drawn=False):
    """Trains one row of the table from given parameters, or from drawn ones, and compares."""
    own, frozen = trained(row.training)
    is_mlp = row.kind == "mlp"
    reduced = "float64" if row.branches == "hosts" else dtype
    precision = Precision(params=reduced, compute=dtype, reduce=reduced)
    sizes = sizes_of(row)
    devices = toy.devices(num_devices(row))
    layouts = lay_out(own, row.strategy, devices=devices, precision=precision, frozen=frozen)
    options = {"accumulate": row.accumulate, "remat": row.remat, "precision": precision}
    step = build_step(own, optimizer(frozen), layouts, clip_norm=CLIP, **options)
    abstract = toy.abstract(batches(is_mlp)[0])
    compiled = step.compile(abstract)
    loss, gradients, params = one_device(row.training)
    state = step.init(row.seed, None if drawn else params_of(row.training))
    assert_really_on(state.params, layouts, sizes)

    for number, batch in enumerate(batches(is_mlp)):
        state, metrics = step(state, batch)
        if number == 0:
            assert toy.relative(metrics.loss, loss) < TOLERANCE[dtype]
            assert worst(natural(layouts, state.opt_state[0].gradients), gradients) < (TOLERANCE[dtype],)
    assert worst(natural(layouts, state.params), params) < (TOLERANCE[dtype],)
    assert_really_on(state.params, layouts, sizes)
    moved = census(compiled.as_text(), layouts.mesh)
    assert separates_ends(own, step.plan) == has_ends(row)
    if has_ends(row):
        assert differing(step.cost(abstract), moved, ("bytes",)) == {}
        return
    assert moved == step.cost(abstract)
    assert unordered(compiled.as_text()) == []


def has_ends(row):
    """Whether the first and the last block of a row run outside the loop over blocks."""
    fsdp = row.strategy.get("fsdp", FSDPConfig(keep="step"))
    gathers = fsdp.keep == "block" and not fsdp.prefetch
    return row.branches != "own" and row.remat == "full" and gathers and "pipe" not in row.strategy


def natural(layouts, tree):
    """The tree with its blocks in the model's order, whichever stages hold them."""
    if layouts.pipeline is None:
        return tree
    return {**tree, "blocks": unstore_blocks(tree["blocks"], layouts.pipeline.stages)}


TENSOR_DIMS = {"tokens": 0, "logits": 1, "query": 2, "out": 1, "gate": -1, "up": -1, "down": -2}
TENSOR_DIMS |= dict.fromkeys(("query_bias", "gate_bias", "up_bias"), 1)
"""The dim of each parameter that `tensor` splits, by the last part of its path; keys and values only if it can."""


def assert_really_on(params, layouts, sizes):
    """Every leaf is on all devices of the mesh asked for, and each shard has the shape that the strategies mean."""
    assert {axis: layouts.mesh.axis_size(axis) for axis in AXES if layouts.mesh.axis_size(axis) > 1} == {
        axis: size for axis, size in sizes.items() if size > 1
    }
    num_devices, split = int(np.prod(list(sizes.values()))), set()
    for row, leaf in zip(layouts.table.rows, jax.tree.leaves(params), strict=True):
        parts = expected_parts(row.path, leaf, sizes)
        counts = [int(np.prod([sizes[axis] for axis in axes])) for axes in parts]
        expected = tuple(size // count for size, count in zip(leaf.shape, counts, strict=True))
        split |= {axis for axes in parts for axis in axes}
        assert len(leaf.sharding.device_set) == num_devices
        assert {shard.data.shape for shard in leaf.addressable_shards} == {expected}, row.path
        replicas = {shard.replica_id for shard in leaf.addressable_shards}
        assert len(replicas) == num_devices * int(np.prod(expected)) // leaf.size
    assert split == set(sizes) - {"data", "context"} - {axis for axis, size in sizes.items() if size == 1}


def expected_parts(path, leaf, sizes):
    """The axes that split each dim of a parameter, said once more and independently of the runtime."""
    parts = [[] for _ in leaf.shape]
    group, name = path.split("/")[0], path.split("/")[-1]
    rank = None
    if "/lora/" in path:  # adapters are split like the dim of their matrix that they have
        rank = {"a": leaf.ndim - 1, "b": leaf.ndim - 2}[name]
        name = path.split("/")[-2]
    stacked = group == "blocks"
    if stacked and sizes.get("pipe", 1) > 1:
        parts[0].append("pipe")
    if stacked and leaf.ndim == 4 and sizes.get("expert", 1) > 1:
        parts[1].append("expert")
    if sizes.get("tensor", 1) > 1:
        dim = TENSOR_DIMS.get(name)
        if name.removesuffix("_bias") in ("key", "value") and SIZES["kv_heads"] % sizes["tensor"] == 0:
            dim = -1
        if dim is not None and dim % leaf.ndim != rank:
            parts[dim].append("tensor")
    fsdp = sizes.get("fsdp", 1)

    def size_of(dim):
        return leaf.shape[dim] // int(np.prod([sizes[axis] for axis in parts[dim]]))

    of_block = int(np.prod([size_of(dim) for dim in range(int(stacked), leaf.ndim)]))
    if fsdp > 1 and of_block * leaf.dtype.itemsize >= table.FLOOR:
        dims = sorted(range(int(stacked), leaf.ndim), key=lambda dim: bool(parts[dim]))
        parts[next(dim for dim in dims if size_of(dim) % fsdp == 0)].append("fsdp")
    return parts
