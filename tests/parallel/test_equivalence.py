"""The promise: under every strategy, training is the training of one device. One table (`table.py`), no row skipped."""

import importlib
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
import reference
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
from support.rows import SIZES, batches, config, first_params, model, num_devices, optimizer, plain, row_named, sizes_of

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
CLIP = 0.5


@cache
def one_device(kind, layers, dropout, seed):
    """First loss and gradients, and last parameters by plain JAX and NumPy: no mesh, and nothing of the runtime.

    In float64 for rows of float32 as well. AdamW divides a gradient by its own size: where that is next to zero, one
    device in float32 is itself further than the tolerance from what is right.
    """
    own, first = config(kind, layers, dropout), None
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, first_params(kind, layers))
        adamw = reference.AdamW(params, rate=1e-3, decay=0.1)
        for number, batch in enumerate(batches(kind == "mlp")):
            key = jax.random.fold_in(jax.random.key(seed), number)
            (total, weight), sums = plain(kind).differentiate(own, params, batch, key)
            means = jax.tree.map(lambda leaf, weight=weight: np.asarray(leaf) / float(weight), sums)
            gradients, _ = reference.clip(means, CLIP)
            params = adamw.update(params, gradients)
            first = first or (float(total / weight), gradients)
    return (*first, params)


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


TWO = {"fsdp": table.options("fsdp", 2)}
ENDS = [
    table.Row("tensor-accumulate", "transformer", {**TWO, "tensor": 2}, accumulate=2, remat="full", dropout=0.1),
    table.Row(
        "overlapped-tensor",
        "transformer",
        {"data": DataParallelConfig(size=2, reduce="overlapped"), **TWO, "tensor": 2},
        remat="full",
    ),
    table.Row("experts", "moe", {**TWO, "expert": 2}, remat="full"),
    table.Row("ring", "gpt", {**TWO, "context": 2}, remat="full"),
]


@pytest.mark.long_cases("experts", "ring", "tensor-accumulate")
@pytest.mark.slow
@pytest.mark.parametrize("row", ENDS, ids=[row.name for row in ENDS])
def test_numbers_on_gpus_with_the_first_and_last_block_outside_the_loop(row, float64, monkeypatch):
    """Simulated devices run this form of the step only here."""
    monkeypatch.setattr(platform, "OVERLAPPING", ("cpu",))
    experts = importlib.import_module("spmdkit.models.moe")
    monkeypatch.setattr(experts, "overhead_of", lambda _, elements: platform.overhead_of("gpu", elements))
    check(row, "float64", of_gpus=True)


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
def test_gradients_of_a_light_model_equal_one_device(name, monkeypatch):
    """Of 4 blocks, in the forms of the step that loop over them."""
    monkeypatch.setattr(platform, "OVERLAPPING", ("cpu",))
    (strategy, remat), (params, _, expected) = QUICK[name], light_on_one_device()
    step = toy.build(strategy, model=LIGHT, remat=remat)
    assert separates_ends(LIGHT, step.plan) == (name == "ends")
    found, _ = step.gradients(step.init(0, params), BATCH)
    assert worst(natural(step.plan, found), expected) < (TOLERANCE["float32"],)


def check(row, dtype, *, drawn=False, of_gpus=False):
    """Trains one row of the table from given parameters, or from drawn ones, and compares."""
    own, is_mlp = model(row.kind, row.layers, row.dropout), row.kind == "mlp"
    precision = Precision(params=dtype, compute=dtype, reduce=dtype)
    sizes = sizes_of(row)
    layouts = lay_out(own, row.strategy, devices=toy.devices(num_devices(row)), precision=precision)
    step = build_step(
        own, optimizer(), layouts, clip_norm=CLIP, accumulate=row.accumulate, remat=row.remat, precision=precision
    )
    abstract = toy.abstract(batches(is_mlp)[0])
    compiled = step.compile(abstract)
    loss, gradients, params = one_device(row.kind, row.layers, row.dropout, row.seed)
    state = step.init(row.seed, None if drawn else first_params(row.kind, row.layers))
    assert_really_on(state.params, layouts, sizes)

    for number, batch in enumerate(batches(is_mlp)):
        state, metrics = step(state, batch)
        if number == 0:
            assert toy.relative(metrics.loss, loss) < TOLERANCE[dtype]
            assert worst(natural(layouts, state.opt_state[0].gradients), gradients) < (TOLERANCE[dtype],)
    assert worst(natural(layouts, state.params), params) < (TOLERANCE[dtype],)
    assert_really_on(state.params, layouts, sizes)
    if of_gpus:
        assert separates_ends(own, step.plan)
        assert differing(step.cost(abstract), census(compiled.as_text(), layouts.mesh), ("bytes",)) == {}
        return
    assert census(compiled.as_text(), layouts.mesh) == step.cost(abstract)
    assert unordered(compiled.as_text()) == []


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
    stacked = group == "blocks"
    if stacked and sizes.get("pipe", 1) > 1:
        parts[0].append("pipe")
    if stacked and leaf.ndim == 4 and sizes.get("expert", 1) > 1:
        parts[1].append("expert")
    if sizes.get("tensor", 1) > 1:
        if name in TENSOR_DIMS:
            parts[TENSOR_DIMS[name]].append("tensor")
        elif name.removesuffix("_bias") in ("key", "value") and SIZES["kv_heads"] % sizes["tensor"] == 0:
            parts[-1].append("tensor")
    fsdp = sizes.get("fsdp", 1)

    def size_of(dim):
        return leaf.shape[dim] // int(np.prod([sizes[axis] for axis in parts[dim]]))

    of_block = int(np.prod([size_of(dim) for dim in range(int(stacked), leaf.ndim)]))
    if fsdp > 1 and of_block * leaf.dtype.itemsize >= table.FLOOR:
        dims = sorted(range(int(stacked), leaf.ndim), key=lambda dim: bool(parts[dim]))
        parts[next(dim for dim in dims if size_of(dim) % fsdp == 0)].append("fsdp")
    return parts
