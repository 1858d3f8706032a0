"""What is kept of gathered parameters, the dtypes of their gradients, and axes that are left to XLA."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.parallel import FSDPConfig, Precision, census
from spmdkit.parallel.sharding.stored_order import unstore_blocks
from support import toy


@cache
def one_step(keep):
    """Metrics and parameters after a step of two microbatches, its collectives, and those that the cost says."""
    config = FSDPConfig(size=2, floor_bytes=256, keep=keep)
    step = toy.build({"fsdp": config}, optax.sgd(1.0), accumulate=2, clip_norm=0.1)
    compiled = step.compile(toy.abstract(toy.batch(0)))
    state, metrics = step(step.init(0, toy.first_params()), toy.batch(0))
    return (metrics, state.params), census(compiled.as_text(), step.plan.mesh), step.cost()


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
    step = toy.build(strategy, precision=precision)
    gradients, _ = jax.eval_shape(step.gradients, step.abstract_state(), toy.abstract(toy.batch(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


LEFT = {"size": 4, "explicit": False}
FSDP = {"fsdp": {"size": 2, "floor_bytes": 512}, "tensor": LEFT}
BY_RULES = {"blocks/up": (None, "fsdp", "tensor"), "blocks/down": (None, "tensor", "fsdp")}
OF_TENSOR = {"blocks/up": (None, None, "tensor"), "blocks/down": (None, "tensor", None)}
ON_ONE_DIM = {"blocks/up": (None, "fsdp", "tensor"), "blocks/down": (None, None, ("tensor", "fsdp"))}
OF_PIPE = {
    "embed/table": ("tensor", "pipe"),
    "blocks/scale": ("pipe", None),
    "blocks/up": ("pipe", None, "tensor"),
    "blocks/down": ("pipe", "tensor", None),
    "head/out": ("pipe", "tensor"),
}
WITH_TENSOR = {
    "fsdp": (FSDP, BY_RULES),
    "keep": ({"fsdp": {**FSDP["fsdp"], "keep": "step"}, "tensor": LEFT}, BY_RULES),
    "one dim": (FSDP, ON_ONE_DIM),
    "zero1": ({"data": {"size": 2, "zero": 1, "floor_bytes": 512}, "tensor": LEFT}, OF_TENSOR),
    "zero2": ({"data": {"size": 2, "zero": 2, "floor_bytes": 512}, "tensor": LEFT}, OF_TENSOR),
    "pipe": ({"pipe": {"size": 2, "embed_and_head": "split"}, "tensor": LEFT}, OF_PIPE),
}


def by_rules(name, remat="none"):
    strategy, rules = WITH_TENSOR[name]
    return toy.build(strategy, optax.sgd(1.0), rules=rules, remat=remat, precision=toy.FLOAT64)


@cache
def on_one_device():
    return toy.on_one_device(toy.BLOCK_MODEL, toy.batch(0), "float64")


def collectives(program, mesh):
    return {(line.kind, *line.axes): line for line in census(program.as_text(), mesh)}


@pytest.mark.slow_cases("keep", "one dim", "zero2", "pipe")
@pytest.mark.parametrize("name", WITH_TENSOR)
def test_parameters_stay_split_over_an_axis_left_to_xla(name, float64):
    """Except in a dim that both axes split: its parts over the other axis are not contiguous after a gather."""
    step, batch, (params, _, gradients) = by_rules(name), toy.batch(0), on_one_device()
    found = collectives(step.compile(toy.abstract(batch)), step.plan.mesh)
    after = step(step.init(0, params), batch)[0].params
    if name == "pipe":
        after = {**after, "blocks": unstore_blocks(after["blocks"], step.plan.pipeline.stages)}
    errors = jax.tree.map(toy.relative, jax.tree.map(np.subtract, params, after), gradients)
    assert max(jax.tree.leaves(errors)) < 1e-9
    over_tensor = {key for key in found if "tensor" in key}
    if name != "one dim":
        assert over_tensor == {("all-reduce", "tensor")}
        assert {line for key, line in found.items() if key not in over_tensor} == set(step.cost(toy.abstract(batch)))


def by_jit(plan):
    """The collectives of `jit` on the same layouts: whole parameters of a block are made where it runs, and again."""

    def put(leaf, *axes):
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(plan.mesh.backend_mesh, PartitionSpec(*axes)))

    @jax.checkpoint
    def block(params, x, key):
        whole = {"up": put(params["up"], None, "tensor"), "down": put(params["down"], "tensor")}
        return put(toy.block({**params, **whole}, x, key), "fsdp")

    def embed(groups, batch, key):
        return put(put(groups["embed"]["table"])[batch["inputs"]], "fsdp")

    def head(groups, x, batch, key):
        return toy.head({"head": {"out": put(groups["head"]["out"])}}, x, batch, key)

    model, arrays = replace(toy.BLOCK_MODEL, block=block, embed=embed, head=head), plan.table.abstract_arrays
    layouts = plan.table.shardings()
    differentiate = jax.value_and_grad(lambda params, batch: model.loss(params, batch, None), has_aux=True)
    compiled = jax.jit(
        differentiate, in_shardings=(layouts, plan.batch_sharding()), out_shardings=(plan.replicated(), layouts)
    )
    return collectives(compiled.lower(arrays, toy.abstract(toy.batch(0))).compile(), plan.mesh)


def test_moves_the_bytes_of_jit_with_an_axis_left_to_xla(float64):
    """Apart from the squares for the norm, one number over fsdp, two over tensor. XLA:CPU has no reduce-scatter."""
    step, number = by_rules("fsdp", remat="full"), 8
    found, expected = collectives(step.compile(toy.abstract(toy.batch(0))), step.plan.mesh), by_jit(step.plan)
    gathers, sums, over_tensor = ("all-gather", "fsdp"), ("all-reduce", "fsdp"), ("all-reduce", "tensor")
    assert set(expected) == {gathers, sums, over_tensor}
    assert found[gathers] == expected[gathers]
    assert found["reduce-scatter", "fsdp"].bytes + found[sums].bytes - number == expected[sums].bytes
    of_model = found[over_tensor].count - 1, found[over_tensor].bytes - 2 * number
    assert of_model == (expected[over_tensor].count, expected[over_tensor].bytes)
