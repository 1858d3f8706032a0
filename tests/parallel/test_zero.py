"""ZeRO stages 1 and 2: where the state lives, what stays whole, how often gradients move, and checkpoints of it."""

from dataclasses import replace
from functools import cache
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.parallel import FSDPConfig, Model, Precision, build_step, lay_out
from spmdkit.parallel.data import DataParallelConfig
from support import toy

ODD = Model(
    init=lambda key: {"wide": jnp.ones((6, 8)), "odd": jnp.ones((7, 9)), "small": jnp.ones((8,))},
    loss=lambda params, batch, key: (sum(leaf.sum() for leaf in params.values()), jnp.ones(())),
)
LARGE, SMALL = 4 * (2 * 3 * 16 * 64 + 2 * 32 * 16), 4 * 3 * 16
"""Bytes of the toy's parameters that stages split, and of the one that they leave whole."""


def zero(stage, size, floor_bytes=512):
    return {"data": DataParallelConfig(size=size, zero=stage, floor_bytes=floor_bytes)}


@cache
def built(stage, size, accumulate=1, fsdp=1):
    beside = {"fsdp": FSDPConfig(size=fsdp, floor_bytes=512)} if fsdp > 1 else {}
    layouts = lay_out(toy.BLOCK_MODEL, {**zero(stage, size), **beside}, devices=toy.devices(size * fsdp))
    return build_step(toy.BLOCK_MODEL, optax.adam(1e-2), layouts, accumulate=accumulate)


def axes(table):
    return {row.path: row.layout.axes for row in table.rows}


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_summed_in_the_reduce_dtype(stage, reduce):
    precision = Precision(compute="bfloat16", reduce=reduce)
    layouts = lay_out(toy.BLOCK_MODEL, zero(stage, 2), devices=toy.devices(2), precision=precision)
    step = build_step(toy.BLOCK_MODEL, optax.sgd(1.0), layouts, precision=precision)
    text = step.lower(toy.abstract(toy.batch(0))).as_text()
    scattered = [line for line in text.split('"stablehlo.')[1:] if line.startswith("reduce_scatter")]
    assert scattered
    short = {"float32": "f32", "bfloat16": "bf16"}[reduce]
    assert {kind for part in scattered for kind in toy.summed_dtypes(f'"stablehlo.{part}')} == {short}


# Where things are


def test_the_state_is_split_and_the_parameters_are_not():
    layouts = built(1, 4).plan
    assert not any(row.layout.used_axes for row in layouts.table.rows)
    assert axes(layouts.update_table) == {
        "blocks/down": (None, "data", None),
        "blocks/scale": (None, None),  # 64 B in a block: under the floor
        "blocks/up": (None, "data", None),
        "embed/table": ("data", None),
        "head/out": ("data", None),
    }
    rules = {row.path: row.rule for row in layouts.update_table.rows}
    assert rules["blocks/up"] == "zero: dim 1 over data"
    assert rules["blocks/scale"] == "data: whole"


def test_the_dim_that_counts_blocks_is_not_split():
    """Though `data` divides the number of blocks, and a stack of them is over the floor where a block is not."""
    params = {"blocks": {"up": jnp.ones((4, 8, 6)), "scale": jnp.ones((4, 8))}, "embed": {}, "head": {"w": jnp.ones(8)}}
    model = replace(toy.BLOCK_MODEL, init=lambda key: params, num_blocks=4)
    layouts = lay_out(model, zero(1, 4, floor_bytes=100), devices=toy.devices(4))
    assert axes(layouts.update_table) == {
        "blocks/scale": (None, None),
        "blocks/up": (None, "data", None),
        "head/w": (None,),
    }


@pytest.mark.parametrize(("stage", "backward", "update"), [(0, 1, 1), (1, 1, 4), (2, 4, 4)])
def test_devices_hold_the_expected_shards(stage, backward, update):
    """Stage 1 splits the optimizer's state alone; stage 2 what backward returns as well."""
    layouts = built(stage, 4).plan
    for table, parts in ((layouts.gradient_table, backward), (layouts.update_table, update)):
        for row in table.rows:
            expected = prod(row.shape) // (1 if row.path == "blocks/scale" else parts)
            assert prod(row.layout.shard_shape(row.shape)) == expected


def test_the_floor():
    at = lay_out(toy.BLOCK_MODEL, zero(1, 4, floor_bytes=32 * 16 * 4), devices=toy.devices(4))
    over = lay_out(toy.BLOCK_MODEL, zero(1, 4, floor_bytes=32 * 16 * 4 + 1), devices=toy.devices(4))
    assert axes(at.update_table)["embed/table"] == ("data", None)
    assert axes(over.update_table)["embed/table"] == (None, None)
    assert axes(over.update_table)["blocks/up"] == (None, "data", None)


def test_the_floor_counts_what_a_device_holds():
    strategy = {**zero(1, 2, floor_bytes=32 * 16 * 4), "fsdp": FSDPConfig(size=2, floor_bytes=512)}
    layouts = lay_out(toy.BLOCK_MODEL, strategy, devices=toy.devices(4))
    assert axes(layouts.update_table)["embed/table"] == ("fsdp", None)
    assert axes(layouts.update_table)["blocks/up"] == (None, "fsdp", "data")


def test_shards_of_shards():
    layouts = built(2, 2, fsdp=2).plan
    assert axes(layouts.table)["embed/table"] == ("fsdp", None)
    assert axes(layouts.update_table)["embed/table"] == ("fsdp", "data")
    assert axes(layouts.update_table)["blocks/up"] == (None, "fsdp", "data")


def test_indivisible_parameters_stay_whole():
    layouts = lay_out(ODD, zero(1, 4, floor_bytes=0), devices=toy.devices(4))
    assert axes(layouts.update_table) == {"odd": (None, None), "small": ("data",), "wide": (None, "data")}


def test_keeps_rules_that_split_over_data():
    rules = {"head/out": [None, "data"]}
    layouts = lay_out(toy.BLOCK_MODEL, zero(2, 4), devices=toy.devices(4), rules=rules)
    assert axes(layouts.table)["head/out"] == axes(layouts.update_table)["head/out"] == (None, "data")
    assert axes(layouts.update_table)["embed/table"] == ("data", None)


def test_one_device_along_data_has_nothing_to_split():
    layouts = lay_out(toy.BLOCK_MODEL, {**zero(2, 1), "fsdp": FSDPConfig(size=2, floor_bytes=512)},
                      devices=toy.devices(2))  # fmt: skip
    assert layouts.zero == 0
    assert layouts.update_table == layouts.table


# What moves


@pytest.mark.parametrize(("stage", "accumulate", "scatters"), [(1, 1, 4), (1, 4, 4), (2, 1, 8), (2, 4, 32)])
def test_how_often_gradients_move(stage, accumulate, scatters):
    """Stage 1 scatters the 4 large arrays once a step; stage 2 in each microbatch, the 2 of blocks block by block."""
    count = {(line.kind, line.axes): line.count for line in built(stage, 4, accumulate).cost()}
    assert count == {
        ("reduce-scatter", ("data",)): scatters,
        ("all-gather", ("data",)): 4,  # the updated parameters
        ("all-reduce", ("data",)): 1,  # what stays whole, with the loss, its weight and the square of the norm
    }


def test_bytes_are_those_of_one_all_reduce():
    moved = {line.kind: line.bytes for line in built(1, 4).cost()}
    assert moved["reduce-scatter"] == moved["all-gather"] == LARGE
    assert moved["all-reduce"] == SMALL + 3 * 4
    (plain,) = built(0, 4).cost()
    assert (plain.kind, plain.bytes) == ("all-reduce", LARGE + SMALL + 2 * 4)


# Checkpoints


@pytest.mark.slow
def test_a_checkpoint_goes_to_other_meshes(tmp_path):
    step = built(2, 4)
    state, _ = step(step.init(0), toy.batch(0))
    expected = jax.tree.map(np.asarray, state)
    with Checkpoints(tmp_path / "checkpoints", keep=1, abstract_state=step.abstract_state()) as checkpoints:
        checkpoints.save(1, state)
    for other in (built(1, 2), built(0, 2), built(1, 2, fsdp=2)):
        wanted = other.abstract_state()
        with Checkpoints(tmp_path / "checkpoints", keep=1, abstract_state=wanted) as checkpoints:
            restored = checkpoints.restore()
        assert jax.tree.all(jax.tree.map(lambda leaf, want: leaf.sharding == want.sharding, restored, wanted))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, restored), expected)
