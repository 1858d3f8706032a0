"""What is kept of gathered parameters, and the dtypes of their gradients."""

from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
from spmdkit.parallel import FSDPConfig, Precision, build_step, census, lay_out
from support import toy


@cache
def one_step(keep):
    """Metrics and parameters after a step of two microbatches, its collectives, and those that the cost says."""
    config = FSDPConfig(size=2, floor_bytes=256, keep=keep)
    layouts = lay_out(toy.BLOCK_MODEL, {"fsdp": config}, devices=toy.devices(2))
    step = build_step(toy.BLOCK_MODEL, optax.sgd(1.0), layouts, accumulate=2, clip_norm=0.1)
    compiled = step.compile(toy.abstract(toy.batch(0)))
    state, metrics = step(step.init(0, toy.first_params()), toy.batch(0))
    return (metrics, state.params), census(compiled.as_text(), layouts.mesh), step.cost()


def test_blocks_that_are_kept_are_gathered_once_a_step():
    """A stack in one, where each microbatch gathers each of the three blocks for forward and again for backward."""
    gathers = {
        keep: next(line.count for line in one_step(keep)[1] if line.kind == "all-gather") for keep in ("block", "step")
    }
    assert gathers["block"] - gathers["step"] == 2 * (2 * 2 * toy.BLOCKS - 1)
    errors = jax.tree.map(toy.relative, one_step("step")[0], one_step("block")[0])
    assert max(jax.tree.leaves(errors)) < 1e-6


@pytest.mark.parametrize("strategy", [{"fsdp": FSDPConfig(size=2, floor_bytes=256)}, {"data": 2}], ids=["fsdp", "data"])
def test_gradients_arrive_in_the_dtype_of_their_parameters(strategy):
    """Though they are computed and summed in bfloat16."""
    precision = Precision(compute="bfloat16", reduce="bfloat16")
    layouts = lay_out(toy.BLOCK_MODEL, strategy, devices=toy.devices(2), precision=precision)
    step = build_step(toy.BLOCK_MODEL, optax.sgd(1.0), layouts, precision=precision)
    gradients, _ = jax.eval_shape(step.gradients, step.abstract_state(), toy.abstract(toy.batch(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
