"""Data parallel: gradients stay local until one sum a bucket, and the cost is what the buckets move."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from spmdkit.parallel import FSDPConfig, Precision, lay_out
from spmdkit.parallel.collectives import Collective, StepCounts, merge, wire_bytes
from spmdkit.parallel.data import axes_to_sum, cost, reduces_in_backward, scalar_width
from spmdkit.parallel.plan import StepOptions
from spmdkit.parallel.step.cost import count_calls
from support import toy
from support.verification import BLOCK_MODEL

AXES = ("data", "fsdp")


@cache
def resolved(**sizes):
    strategy = {**sizes, **({"fsdp": FSDPConfig(size=sizes["fsdp"], floor_bytes=256)} if "fsdp" in sizes else {})}
    return toy.plan(strategy, BLOCK_MODEL)


def bytes_of(*paths, resolved):
    rows = {row.path: row for row in resolved.table.rows}
    return sum(4 * int(np.prod(rows[path].layout.shard_shape(rows[path].shape))) for path in paths)


PATHS = ("blocks/down", "blocks/scale", "blocks/up", "embed/table", "head/out")


def test_axes_that_a_layout_lacks_are_those_to_sum():
    layouts = {row.path: row.layout for row in resolved(data=2, fsdp=2).table.rows}
    assert axes_to_sum(layouts["blocks/scale"], AXES) == AXES
    assert axes_to_sum(layouts["blocks/up"], AXES) == ("data",)
    assert axes_to_sum(layouts["blocks/up"], ("fsdp",)) == ()


def cost_of(plan, reduce="float32", platform="cpu", **counts):
    given = replace(plan, options=StepOptions(precision=Precision(reduce=reduce)))
    return cost(given, StepCounts(count_calls(BLOCK_MODEL, 1), **counts), platform)


def test_alone_it_is_one_sum_of_everything():
    size = bytes_of(*PATHS, resolved=resolved(data=2))
    assert cost_of(resolved(data=2)) == [Collective("all-reduce", ("data",), 1, size + 8)]
    assert cost_of(resolved(data=2), metrics=4) == [Collective("all-reduce", ("data",), 1, size + 8 + 16)]


def test_beside_fsdp_there_are_two_buckets():
    plan = resolved(data=2, fsdp=2)
    split = tuple(path for path in PATHS if path != "blocks/scale")
    assert cost_of(plan) == [
        Collective("all-reduce", AXES, 1, bytes_of("blocks/scale", resolved=plan) + 8),
        Collective("all-reduce", ("data",), 1, bytes_of(*split, resolved=plan)),
    ]


def test_where_gradients_are_complete_their_squares_join():
    plan = resolved(fsdp=2)
    (line,) = cost_of(plan)
    assert line.bytes == bytes_of("blocks/scale", resolved=plan) + 12


@pytest.mark.parametrize(
    ("dtype", "platform", "width", "scalar"), [("bfloat16", "gpu", 2, 4), ("float64", "cpu", 8, 8)]
)
def test_gradients_move_in_the_reduce_dtype_and_scalars_at_least_in_float32(dtype, platform, width, scalar):
    (line,) = cost_of(resolved(data=2), dtype, platform)
    assert line.bytes == bytes_of(*PATHS, resolved=resolved(data=2)) // 4 * width + 2 * scalar
    assert scalar_width(dtype) == scalar


@pytest.mark.parametrize(
    ("options", "device", "step", "expected"),
    [
        ({}, "cpu", {}, False),
        ({}, "cuda", {}, True),
        ({"reduce": "at_end"}, "cuda", {}, False),
        ({"reduce": "overlapped"}, "cpu", {}, True),
        ({"reduce": "overlapped"}, "cpu", {"accumulate": 2}, False),
        ({"zero": 1}, "cuda", {}, False),
        ({"compress": "int8"}, "cuda", {}, False),
    ],
)
def test_sums_in_backward_on_gpus_or_if_selected(options, device, step, expected):
    devices = [f"{device}:{number}" for number in range(4)]
    plan = lay_out(BLOCK_MODEL, {"data": {"size": 4, **options}}, devices=devices)
    assert reduces_in_backward(replace(plan, options=StepOptions(**step))) == expected


def test_overlapped_sums_have_the_bytes_of_one_sum():
    """One all-reduce for each block and one for the rest, in place of one of everything."""
    plans = [toy.plan({"data": {"size": 4, "reduce": when}}, BLOCK_MODEL) for when in ("at_end", "overlapped")]
    (whole,), parts = map(cost_of, plans)
    assert sum(line.count for line in parts) == BLOCK_MODEL.num_blocks + 1
    assert sum(line.bytes for line in parts) == whole.bytes


def test_evaluates_alike_if_sums_are_overlapped():
    """Evaluation types all parameters as varying before the blocks do."""
    batch, losses = toy.batch(0), []
    for when in ("at_end", "overlapped"):
        step = toy.build({"data": {"size": 4, "reduce": when}}, model=BLOCK_MODEL)
        losses.append(float(step.evaluate(step.init(0).params, batch)[0]))
    assert losses[0] == losses[1]


def gather(count, size, axes=("fsdp",)):
    return Collective("all-gather", axes, count, size)


def test_lines_of_one_kind_and_axes_add_up():
    scatter = Collective("reduce-scatter", ("fsdp",), 1, 7)
    lines = [scatter, gather(2, 10), gather(1, 4, ("data", "fsdp")), gather(3, 5)]
    assert merge(lines) == (gather(1, 4, ("data", "fsdp")), gather(5, 15), scatter)
    assert merge(reversed(lines)) == merge(lines)


def test_merge_omits_lines_without_calls():
    assert merge([gather(0, 0), gather(2, 8).times(0)]) == merge([]) == ()


@pytest.mark.parametrize(
    ("dtype", "cpu", "gpu"),
    [("bfloat16", 4, 2), ("float16", 2, 2), ("float32", 4, 4), ("float64", 8, 8), ("int16", 2, 2)],
)
def test_bytes_on_the_wire(dtype, cpu, gpu):
    assert (wire_bytes(dtype, "cpu"), wire_bytes(dtype, "gpu")) == (cpu, gpu)
