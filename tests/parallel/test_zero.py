"""ZeRO stages 1 and 2: where the state lives, what stays whole, and how often gradients move."""

from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod

import jax.numpy as jnp
import optax
import pytest
from spmdkit.parallel import FSDPConfig, Model, Precision
from spmdkit.parallel.collectives import StepCounts
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.zero import cost
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
    return toy.build({**zero(stage, size), **beside}, optax.adam(1e-2), accumulate=accumulate)


def axes(table):
    return {row.path: row.layout.axes for row in table.rows}


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_summed_in_the_reduce_dtype(stage, reduce):
    step = toy.build(zero(stage, 2), precision=Precision(compute="bfloat16", reduce=reduce))
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
    layouts = toy.plan(zero(1, 4, floor_bytes=100), model)
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


@pytest.mark.parametrize(
    ("size", "fsdp", "floor", "table", "up"),
    [
        (4, 1, 32 * 16 * 4, ("data", None), (None, "data", None)),
        (4, 1, 32 * 16 * 4 + 1, (None, None), (None, "data", None)),
        (2, 2, 32 * 16 * 4, ("fsdp", None), (None, "fsdp", "data")),  # the floor counts what a device holds
        (2, 2, 512, ("fsdp", "data"), (None, "fsdp", "data")),
    ],
)
def test_splits_what_reaches_the_floor(size, fsdp, floor, table, up):
    strategy = {**zero(1, size, floor_bytes=floor), "fsdp": FSDPConfig(size=fsdp, floor_bytes=512)}
    found = axes(toy.plan(strategy).update_table)
    assert (found["embed/table"], found["blocks/up"]) == (table, up)


def test_indivisible_parameters_stay_whole():
    layouts = toy.plan(zero(1, 4, floor_bytes=0), ODD)
    assert axes(layouts.update_table) == {"odd": (None, None), "small": ("data",), "wide": (None, "data")}


def test_keeps_rules_that_split_over_data():
    rules = {"head/out": [None, "data"]}
    layouts = toy.plan(zero(2, 4), rules=rules)
    assert axes(layouts.table)["head/out"] == axes(layouts.update_table)["head/out"] == (None, "data")
    assert axes(layouts.update_table)["embed/table"] == ("data", None)


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


def test_frozen_parameters_are_gathered_but_not_scattered():
    plan = toy.plan(zero(1, 4), frozen=frozenset({"blocks/up"}))
    moved = Counter(line.kind for line in cost(plan, StepCounts(calls={}), "cpu"))
    assert moved == {"all-gather": 4, "reduce-scatter": 3}


def test_bytes_are_those_of_one_all_reduce():
    moved = {line.kind: line.bytes for line in built(1, 4).cost()}
    assert moved["reduce-scatter"] == moved["all-gather"] == LARGE
    assert moved["all-reduce"] == SMALL + 3 * 4
    (plain,) = built(0, 4).cost()
    assert (plain.kind, plain.bytes) == ("all-reduce", LARGE + SMALL + 2 * 4)
