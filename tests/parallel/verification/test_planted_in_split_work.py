"""Mistakes planted where a model or a pipeline splits the work are found, named and explained."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import toy
from jax import lax
from planted import (
    BLOCK_MODEL,
    OPTIMIZER,
    found,
    given_init,
    one_device_is_compiled_once,  # noqa: F401  (a fixture of every test here)
    unchecked,
)
from spmdkit.parallel import BlockModel, verify
from spmdkit.parallel import data as data_strategy
from spmdkit.parallel.executor.stage import Stage


def split_block_model(size):
    """The toy with its hidden width split over `tensor`; every device returns its share of the loss."""

    def block(params, x, key):
        whole = lax.all_gather(x, "tensor", axis=1, tiled=True)
        partial = jnp.tanh((whole * params["scale"][None, None]) @ params["up"]) @ params["down"]
        return x + lax.psum_scatter(partial, "tensor", scatter_dimension=1, tiled=True)

    def own(array):
        length = array.shape[1] // size
        return lax.dynamic_slice_in_dim(array, lax.axis_index("tensor") * length, length, 1)

    def embed(groups, batch, key):
        return groups["embed"]["table"][own(batch["inputs"])]

    def head(groups, x, batch, key):
        return toy.head(groups, x, {name: own(batch[name]) for name in ("targets", "weights")}, key)

    rules = {"blocks/up": (None, None, "tensor"), "blocks/down": (None, "tensor", None)}
    return replace(BLOCK_MODEL, embed=embed, block=block, head=head, rules=rules)


TENSOR_MODEL = replace(BLOCK_MODEL, parallelize=lambda parallel: split_block_model(parallel.tensor.size))


def verified_tensor():
    assert isinstance(TENSOR_MODEL, BlockModel)
    given = [toy.batch(seed, rows=4) for seed in range(2)]
    return verify(TENSOR_MODEL, {"data": 2, "tensor": 2}, given, optimizer=OPTIMIZER, devices=toy.devices(4))


def test_a_missing_sum_over_tensor(monkeypatch):
    """The gradient of a parameter that every device of `tensor` holds is summed over `data` alone."""
    right = data_strategy.reduce_gradients

    def wrong(gradients, scalars, layouts, axes, dtype):
        summed, scalars = right(gradients, scalars, layouts, axes, dtype)
        blocks = {**summed["blocks"], "scale": lax.psum(gradients["blocks"]["scale"], "data")}
        return {**summed, "blocks": blocks}, scalars

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    with unchecked(monkeypatch):
        result = verified_tensor()
    found(result, "gradients", "blocks/scale", "Devices along tensor hold different", "a missing psum over tensor")


@pytest.mark.slow
def test_numbers_of_a_model_that_splits_its_own_work():
    """It predicts none of its own traffic, and that is all that is found."""
    found(verified_tensor(), "collectives", "", "all-gather over tensor: none predicted")


def verified_pipeline(**options):
    given = [toy.batch(seed, rows=8) for seed in range(2)]
    return verify(BLOCK_MODEL, {"pipe": {"size": 2, **options}}, given, optimizer=OPTIMIZER, devices=toy.devices(2))


@pytest.mark.slow
def test_blocks_that_are_stored_in_another_order():
    """5 blocks on 2 stages of 2 chunks, the second in the opposite order, with places that are filled up."""

    def five(key):
        params = given_init(key)
        return {**params, "blocks": jax.tree.map(lambda leaf: jnp.concatenate([leaf, -leaf[:2]]), params["blocks"])}

    model = replace(BLOCK_MODEL, init=five, num_blocks=5)
    strategy = {"pipe": {"size": 2, "schedule": "zbv", "microbatches": 2}}
    result = verify(model, strategy, [toy.batch(seed, rows=4) for seed in range(2)], devices=toy.devices(2))
    assert result.ok, str(result)


def test_a_head_that_drops_a_microbatch(monkeypatch):
    """Neither loss nor weight counts it, and no gradient starts from it."""
    right = Stage.head

    def wrong(stage, tick, groups, y):
        sums = right(stage, tick, groups, y)
        counts = (tick.entry.microbatch != 1).astype(sums.total.dtype)
        return jax.tree.map(lambda leaf: leaf * counts, sums)

    monkeypatch.setattr(Stage, "head", wrong)
    found(verified_pipeline(), "loss", "", "microbatch 2 of the 4 of every device (rows 2, 3 of 8) is not counted")


@pytest.mark.slow
def test_a_stage_that_drops_a_microbatch(monkeypatch):
    """The loss counts it, but one stage leaves it out of the gradients of its layers."""
    right = Stage.backward_weight

    def wrong(stage, tick, *given):
        entry = tick.entry
        dropped = (entry.microbatch == 2) & (lax.axis_index("pipe") == 0)
        tick.entry = entry._replace(num_blocks=jnp.where(dropped, 0, entry.num_blocks))
        gradients = right(stage, tick, *given)
        tick.entry = entry
        return gradients

    monkeypatch.setattr(Stage, "backward_weight", wrong)
    result = verified_pipeline()
    first = found(
        result, "gradients", result.gradients[0].path,
        "On stage 0 of pipe alone: microbatch 3 of the 4 of every device (rows 4, 5 of 8) is not counted",
    )  # fmt: skip
    assert first.where.startswith("blocks/")
