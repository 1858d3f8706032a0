"""Everything that cannot combine, and some of what does."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import FSDPConfig
from support import toy

from spmdkit import DeviceMesh, LayoutError

MODEL = transformer(TransformerConfig(vocabulary=32, length=16, layers=4, width=16, heads=4, kv_heads=2, mlp_width=32))
STATEFUL = replace(toy.PLAIN_MODEL, init_state=lambda key: {"mean": jnp.zeros(4)})
FSDP = FSDPConfig(size=2, floor_bytes=64)
AHEAD = FSDPConfig(size=2, floor_bytes=64, prefetch=1)


@pytest.mark.parametrize(
    ("model", "strategy", "problem"),
    [
        (toy.PLAIN_MODEL, {"context": 2},
         "strategy.context=2: model 'model' cannot split the positions of a row. Use a model with `parallelize`, such "
         "as the transformer, or give the devices to strategy.data or fsdp."),
        (toy.BLOCK_MODEL, {"context": 2, "data": 1}, "model 'block model' cannot split the positions of a row."),
        (toy.BLOCK_MODEL, DeviceMesh.of(toy.devices(2), context=2), "strategy.context=2: model 'block model' cannot"),
        (toy.PLAIN_MODEL, {"pipe": 2},
         "strategy.pipe=2: a pipeline needs a BlockModel (embed, block, head), and model 'model' is one function."),
        (STATEFUL, {"pipe": 2}, "keeps a state (init_state), which a BlockModel cannot. Give the devices to"),
        (MODEL, {"pipe": 8}, "model.layers=4 cannot be split over 8 stages (1f1b)"),
        (MODEL, {"pipe": {"size": 2, "microbatches": 1}}, "Set strategy.pipe.microbatches to 2 or more"),
        (MODEL, {"pipe": {"size": 2, "virtual": 2}}, "Leave strategy.pipe.virtual out, or take interleaved_1f1b."),
        (MODEL, {"expert": 2}, "this model does not have experts to split. Set model.name=moe, or give these devices"),
        (MODEL, {"context": 3}, "Set data.length to a multiple of 6, or lower strategy.context."),
        (MODEL, {"pipe": 2, "fsdp": AHEAD}, "strategy.fsdp.prefetch=1 does not combine with strategy.pipe"),
        (MODEL, {"data": {"size": 2, "zero": 2}, "fsdp": AHEAD}, "does not combine with strategy.data.zero=2"),
        (toy.PLAIN_MODEL, {"fsdp": AHEAD}, "model 'model' is one function without blocks, which could be gathered"),
        (MODEL, {"tensor": {"size": 2, "explicit": False}}, "'tensor' of size 2 splits no parameter"),
        (toy.BLOCK_MODEL, {"tensor": 2}, "Name it in a rule of layouts.rules, or set strategy.tensor to 1."),
        (toy.BLOCK_MODEL, DeviceMesh.of(toy.devices(2), tensor=2), "'tensor' of size 2 splits no parameter"),
    ],
)  # fmt: skip
def test_rejects_invalid_combinations(model, strategy, problem):
    with pytest.raises(ValueError) as raised:
        toy.plan(strategy, model)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    "strategy",
    [
        {"pipe": {"size": 2, "microbatches": 4}, "data": {"size": 2, "zero": 1, "floor_bytes": 64}},
        {"pipe": {"size": 2, "microbatches": 4}, "data": {"size": 2, "zero": 2, "floor_bytes": 64}},
        {"pipe": 2, "data": {"size": 2, "local_steps": 2}},
        {"pipe": 2, "data": {"size": 2, "compress": "int8"}},
        {"pipe": 2, "fsdp": FSDPConfig(size=2, floor_bytes=64, keep="step")},
        {"data": {"size": 2, "zero": 1}, "fsdp": AHEAD},
        {"data": {"size": 2, "local_steps": 2}, "tensor": 2},
        {"fsdp": FSDP, "context": 2, "tensor": 2},
    ],
)
def test_accepts_valid_combinations(strategy):
    assert set(toy.plan(strategy, MODEL).manual_axes) == set(strategy)


def test_reports_all_invalid_combinations():
    pipe = {"size": 2, "embed_and_head": "split"}
    with pytest.raises(LayoutError) as raised:
        toy.plan({"pipe": pipe, "data": {"size": 2, "zero": 2}, "fsdp": AHEAD}, MODEL)
    told = [problem.split(" does not")[0].split(" scatters")[0] for problem in raised.value.problems]
    assert told == [*["strategy.fsdp.prefetch=1"] * 2, "strategy.pipe.embed_and_head=split"]
