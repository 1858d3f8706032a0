"""What is kept of gathered parameters, and the dtypes of their gradients."""

from dataclasses import replace
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


def odd_bias(key):
    """Parameters of which 2 divides no dim: a bias in every block, and one beside the head."""
    params = toy.init(key)
    params["blocks"]["bias"] = jnp.full((toy.BLOCKS, 1, 1, 1), 0.1)
    params["head"]["bias"] = jnp.full((1, 1, 1), 0.1)
    return params


ODD_MODEL = replace(
    toy.BLOCK_MODEL,
    init=odd_bias,
    block=lambda params, x, key: toy.block(params, x + params["bias"], key),
    head=lambda groups, x, batch, key: toy.head(groups, x + groups["head"]["bias"], batch, key),
)


@pytest.mark.slow
@pytest.mark.parametrize("floor", [0, 1 << 30], ids=["indivisible", "under the floor"])
def test_sums_gradients_of_parameters_that_stay_whole(floor, float64):
    """Those that fsdp cannot split, and a tiny model under the floor: as on one device, with the cost as the census."""
    gradients, precision = {}, Precision(params="float64", compute="float64", reduce="float64")
    for size in (1, 2):
        strategy = {"fsdp": FSDPConfig(size=size, floor_bytes=floor)}
        layouts = lay_out(ODD_MODEL, strategy, devices=toy.devices(size), precision=precision)
        step = build_step(ODD_MODEL, optax.sgd(1.0), layouts, precision=precision)
        gradients[size], _ = step.gradients(step.init(0), toy.batch(0))
    assert [row.path for row in layouts.table.rows if not row.layout.used_axes] == ["blocks/bias", "head/bias"]
    assert len(layouts.table.notes) == 1 + (floor > 0)
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, gradients[2], gradients[1]))) < 1e-9
    assert census(step.compile(toy.abstract(toy.batch(0))).as_text(), layouts.mesh) == step.cost()


@pytest.mark.parametrize("strategy", [{"fsdp": FSDPConfig(size=2, floor_bytes=256)}, {"data": 2}], ids=["fsdp", "data"])
def test_gradients_arrive_in_the_dtype_of_their_parameters(strategy):
    """Though they are computed and summed in bfloat16."""
    precision = Precision(compute="bfloat16", reduce="bfloat16")
    layouts = lay_out(toy.BLOCK_MODEL, strategy, devices=toy.devices(2), precision=precision)
    step = build_step(toy.BLOCK_MODEL, optax.sgd(1.0), layouts, precision=precision)
    gradients, _ = jax.eval_shape(step.gradients, step.abstract_state(), toy.abstract(toy.batch(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
