"""Blocks gathered ahead: what that does not combine with, and packed rows."""

import jax
import optax
import pytest
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import FSDPConfig, build_step, lay_out
from spmdkit.parallel.blocks import prefetch
from spmdkit.parallel.blocks.prefetch import check_prefetch
from spmdkit.parallel.context import ContextConfig
from support import toy


def test_rejects_invalid_prefetch_options():
    check_prefetch(4, "none")
    check_prefetch(4, "full")
    with pytest.raises(ValueError) as raised:
        check_prefetch(3, "dots")
    blocks, remat = str(raised.value).splitlines()
    assert blocks == (
        "strategy.fsdp.prefetch=1 needs 4 blocks or more, and the model has 3: a shorter loop cannot hide a gather. "
        "Set strategy.fsdp.prefetch to 0, or increase model.layers."
    )
    assert remat.startswith("train.remat=dots does not combine with strategy.fsdp.prefetch=1: ")
    assert remat.endswith("Set train.remat to none or full, or prefetch to 0.")


def test_build_step_rejects_prefetch_with_dots():
    layouts = lay_out(toy.BLOCK_MODEL, {"fsdp": FSDPConfig(size=4, prefetch=1)}, devices=toy.devices(4))
    with pytest.raises(ValueError, match=r"train\.remat=dots does not combine with strategy\.fsdp\.prefetch=1"):
        build_step(toy.BLOCK_MODEL, optax.sgd(1.0), layouts, remat="dots")


def test_rejects_prefetch_of_blocks_that_are_kept():
    with pytest.raises(ValueError, match=r"strategy.fsdp.prefetch has an effect only with keep: block"):
        FSDPConfig(size=2, prefetch=1, keep="step")


PACKED = {
    name: jax.ShapeDtypeStruct((8, 16), "float32" if name == "weights" else "int32")
    for name in ("inputs", "targets", "weights", "segments", "positions")
}


def test_all_gathers_but_the_first_of_forward_wait(monkeypatch):
    waits = []
    record = lambda done, value: [waits.append(bool(jax.tree.leaves(done))), value][1]  # noqa: E731
    monkeypatch.setattr(prefetch, "order_after", record)
    model = transformer(TransformerConfig(vocabulary=16, length=16, layers=4, width=8, heads=2))
    toy.build({"fsdp": FSDPConfig(size=2, floor_bytes=0, prefetch=1)}, model=model, remat="full").trace(PACKED)
    assert (waits.count(False), waits.count(True)) == (1, 9)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["all_to_all", "ring"])
def test_packed_rows_with_context_pass_vma_checks(attention):
    """What varies over fewer axes than activations, segments, keeps its type: no UncheckedStep, which is an error."""
    model = transformer(TransformerConfig(vocabulary=16, length=16, layers=4, width=8, heads=2))
    strategy = {
        "fsdp": FSDPConfig(size=2, floor_bytes=256, prefetch=1),
        "context": ContextConfig(size=2, attention=attention),
    }
    step = build_step(model, optax.sgd(0.1), lay_out(model, strategy, devices=toy.devices(4)))
    assert "optimization_barrier" in step.lower(PACKED, "cpu").as_text()
