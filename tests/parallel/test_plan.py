"""What the rest of the runtime asks of the layouts: axes by meaning, what is in force, and rows that do not divide."""

from dataclasses import replace

import pytest
from jax.sharding import PartitionSpec as P
from spmdkit.parallel import lay_out
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.sharding.parallel_context import parallel_context
from support import toy
from support.small_transformers import FSDP, MIXTURE, MODEL, layouts

from spmdkit import ShardingPlan


def test_empty_slots_of_stages_are_not_parameters():
    plans = [layouts(2, pipe={"size": 2, "layers": split}) for split in ([2, 2], [3, 1])]
    assert plans[0].num_parameters == plans[1].num_parameters < plans[1].table.num_elements


def test_resolves_the_roles_of_axes():
    three = layouts(8, pipe=2, fsdp=FSDP, tensor=2)
    assert three.batch_axes == three.gather_axes == ("fsdp",)
    assert three.manual_axes == three.summed_axes == ("pipe", "fsdp", "tensor")
    assert (three.eval_rows.total, three.batch_spec) == (2, P(("fsdp",)))
    assert parallel_context(three).tensor.size == 2
    assert parallel_context(three).context.size == 1
    assert three.pipeline.stages.counts == ((2,), (2,))


def test_expert_axis_splits_rows_without_gathers():
    mixed = layouts(8, MIXTURE, data=2, fsdp=FSDP, expert=2)
    assert mixed.batch_axes == ("data", "fsdp", "expert")
    assert mixed.gather_axes == ("data", "fsdp")
    assert mixed.eval_rows.total == 8


def test_an_axis_left_to_xla_is_not_manual():
    rules = {"blocks/mlp/(gate|up)": [None, "fsdp", "tensor"]}
    left = lay_out(MODEL, {"fsdp": FSDP, "tensor": {"size": 2, "explicit": False}}, rules=rules, devices=toy.devices(4))
    assert left.manual_axes == ("fsdp",)
    assert parallel_context(left).tensor.size == 1
    specs = left.manual_specs(left.table)
    assert specs["blocks"]["mlp"]["gate"] == P(None, "fsdp")


@pytest.mark.parametrize(
    ("data", "zero", "local_steps", "compressed"),
    [
        (DataParallelConfig(size=2, zero=1), 1, 0, False),
        (DataParallelConfig(size=2, local_steps=4), 0, 4, False),
        (DataParallelConfig(size=2, compress="int8"), 0, 0, True),
    ],
)
def test_options_are_in_force_where_there_are_devices(data, zero, local_steps, compressed):
    two = layouts(2, data=data)
    assert (two.zero, two.local_steps, two.compressed) == (zero, local_steps, compressed)
    one = layouts(1, data=replace(data, size=1))
    assert (one.zero, one.local_steps, one.compressed) == (0, 0, False)
    assert one.exact is one


def test_local_steps_sum_nothing_over_data():
    local = layouts(4, data=DataParallelConfig(size=2, local_steps=2), fsdp=FSDP)
    assert (local.manual_axes, local.summed_axes) == (("data", "fsdp"), ("fsdp",))
    assert local.exact.summed_axes == ("data", "fsdp")


def test_used_layouts_drop_gathered_axes():
    pipe = {"size": 2, "microbatches": 4, "embed_and_head": "split"}
    split = layouts(4, pipe=pipe, data=DataParallelConfig(size=2, zero=1, floor_bytes=64))
    stored, used, updated = (
        {row.path: row.layout.axes for row in table.rows}
        for table in (split.table, split.used_table, split.update_table)
    )
    assert (stored["embed/tokens"], used["embed/tokens"]) == (("pipe", None), (None, None))
    assert updated["embed/tokens"] == ("pipe", "data")
    assert stored["blocks/mlp/up"] == used["blocks/mlp/up"] == ("pipe", None, None)
    assert split.gradient_table == split.used_table
    within = layouts(2, data=DataParallelConfig(size=2, zero=2, floor_bytes=64))
    assert within.gradient_table == within.update_table != within.table


def test_plan_prints_its_table():
    plan = layouts(2, data=2)
    assert str(plan) == str(plan.table)
    assert isinstance(plan, ShardingPlan)
    assert plan.platform == "cpu"
    assert not plan.keeps_blocks
    assert layouts(2, fsdp=replace(FSDP, keep="step")).keeps_blocks
