"""What the rest of the runtime asks of the layouts: axes by meaning, what is in force, and rows that do not divide."""

from dataclasses import replace

import pytest
import toy
from jax.sharding import PartitionSpec as P
from spmdkit.models.moe import moe
from spmdkit.models.moe_config import MoEConfig
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import FSDPConfig, lay_out
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.sharding.batch_rows import check_rows
from spmdkit.parallel.sharding.parallel_context import parallel_context

SIZES = {"vocabulary": 32, "length": 16, "layers": 4, "width": 16, "heads": 4, "mlp_width": 32}
MODEL = transformer(TransformerConfig(**SIZES))
MIXTURE = moe(MoEConfig(**SIZES, experts=4, top_k=2))
FSDP = FSDPConfig(size=2, floor_bytes=64)


def layouts(devices, model=MODEL, **strategy):
    return lay_out(model, strategy, devices=toy.devices(devices))


def test_what_the_axes_mean():
    three = layouts(8, pipe=2, fsdp=FSDP, tensor=2)
    assert three.batch_axes == three.gather_axes == ("fsdp",)
    assert three.manual_axes == three.summed_axes == ("pipe", "fsdp", "tensor")
    assert (three.num_batch_shards, three.batch_spec) == (2, P(("fsdp",)))
    assert parallel_context(three).tensor.size == 2
    assert parallel_context(three).context.size == 1
    assert three.pipeline.stages.counts == ((2,), (2,))


def test_rows_are_over_the_experts_axis_but_nothing_is_gathered_over_it():
    mixed = layouts(8, MIXTURE, data=2, fsdp=FSDP, expert=2)
    assert mixed.batch_axes == ("data", "fsdp", "expert")
    assert mixed.gather_axes == ("data", "fsdp")
    assert mixed.num_batch_shards == 8


def test_an_axis_left_to_xla_is_not_manual():
    rules = {"blocks/mlp/(gate|up)": [None, "fsdp", "tensor"]}
    left = lay_out(MODEL, {"fsdp": FSDP, "tensor": {"size": 2, "explicit": False}}, rules=rules, devices=toy.devices(4))
    assert left.manual_axes == ("fsdp",)
    assert parallel_context(left).tensor.size == 1
    specs = left.manual_specs(left.table)
    assert specs["blocks"]["mlp"]["gate"] == P(None, ("fsdp",), None)


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


@pytest.mark.parametrize(
    ("given", "rows", "accumulate", "problem"),
    [
        (layouts(4, data=2, fsdp=FSDP), 6, 1,
         "A batch of 6 rows cannot be split over data 2 x fsdp 2 and accumulate 1: 6 % 4 = 2. Set train.global_batch "
         "to a multiple of 4 (8 is the nearest), or change strategy or train.accumulate."),
        (layouts(4, data=2, pipe={"size": 2, "microbatches": 4}), 20, 2,
         "A batch of 20 rows cannot be split over data 2, strategy.pipe.microbatches 4 and accumulate 2: 20 % 16 = 4. "
         "Set train.global_batch to a multiple of 16 (16 is the nearest), or change strategy or train.accumulate."),
        (layouts(2, tensor=2), 3, 2, "A batch of 3 rows cannot be split over 1 device and accumulate 2: 3 % 2 = 1."),
        (layouts(2, MIXTURE, expert=2), 3, 1, "cannot be split over expert 2 and accumulate 1: 3 % 2 = 1."),
        (layouts(1, data=1), 0, 1, "A batch of 0 rows"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_split(given, rows, accumulate, problem):
    with pytest.raises(ValueError) as raised:
        check_rows(given, rows, accumulate)
    assert problem in str(raised.value)
    check_rows(given, given.num_batch_shards * 8 * accumulate, accumulate)


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"blocks/mlp/gate": [None, None, None]},
         "strategy.pipe splits dim 0 of what is under blocks, and no other dim. Start this rule in layouts.rules with "
         "pipe."),
        ({"embed/tokens": ["pipe", None]},
         "strategy.pipe splits nothing outside the blocks. Leave pipe out of this rule in layouts.rules."),
    ],
)  # fmt: skip
def test_rules_that_contradict_a_pipeline(rules, problem):
    with pytest.raises(ValueError) as raised:
        lay_out(MODEL, {"pipe": 2}, rules=rules, devices=toy.devices(2))
    assert problem in str(raised.value)
