"""Embedding and head split over the stages: whole while a step runs, by one gather and one scatter each."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import toy
from jax import lax
from planted import BLOCK_MODEL
from spmdkit.parallel import lay_out
from spmdkit.parallel.pipeline import PipelineConfig, begin, finish


@cache
def plan(embed_and_head="split"):
    pipe = PipelineConfig(size=2, microbatches=2, layers=(1, 2), embed_and_head=embed_and_head)
    return lay_out(BLOCK_MODEL, {"pipe": pipe, "data": 2}, devices=toy.devices(4))


def layouts_of(table):
    return {row.path: str(row.layout) for row in table.rows}


def test_within_a_step_nothing_outside_the_blocks_is_split():
    stored, within = (layouts_of(table) for table in (plan().table, plan().used_table))
    assert (stored["embed/table"], stored["head/out"]) == ("(pipe, None)", "(pipe, None)")
    assert (within["embed/table"], within["head/out"]) == ("(None, None)", "(None, None)")
    assert within["blocks/up"] == stored["blocks/up"] == "(pipe, None, None)"


def test_what_is_gathered_is_scattered_again():
    specs = plan().manual_specs(plan().table)

    def run(params):
        whole = begin(params, plan())
        assert whole["embed"]["table"].shape == (toy.VOCABULARY, toy.WIDTH)
        assert whole["blocks"] is params["blocks"]
        share = (1.0 + 10 * lax.axis_index("pipe")).astype("bfloat16")
        local = {**whole, "head": {"out": whole["head"]["out"].astype("bfloat16") * share}}
        return finish(local, plan())

    mapped = jax.shard_map(run, mesh=plan().mesh.backend_mesh, in_specs=(specs,), out_specs=specs)
    given = jax.tree.map(
        lambda leaf: jnp.arange(float(leaf.size)).reshape(leaf.shape) % 64, plan().table.abstract_arrays
    )
    found = jax.jit(mapped)(given)
    assert np.array_equal(found["embed"]["table"], 2 * given["embed"]["table"]), "both stages hold the same"
    assert np.array_equal(found["head"]["out"], 12 * given["head"]["out"]), "summed over the stages"
    assert found["head"]["out"].dtype == jnp.bfloat16
    assert np.array_equal(found["blocks"]["up"], given["blocks"]["up"])


def test_sums_are_in_the_reduce_dtype():
    """In bfloat16, 256 and 1 would be 256."""
    specs = plan().manual_specs(plan().table)

    def run(params):
        whole = begin(params, plan())
        share = jnp.where(lax.axis_index("pipe") == 0, 256, 1)
        local = jax.tree.map(lambda leaf: (leaf * share).astype("bfloat16"), whole)
        return jax.tree.map(lambda leaf: leaf - 256, finish(local, plan()))["head"]

    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), plan().table.abstract_arrays)
    mapped = jax.shard_map(run, mesh=plan().mesh.backend_mesh, in_specs=(specs,), out_specs=specs["head"])
    text = str(jax.make_jaxpr(mapped)(ones))
    assert [line for line in text.splitlines() if "reduce_scatter" in line]
    scatter = next(line for line in text.splitlines() if "= reduce_scatter" in line)
    assert ":f32[" in scatter.split("=")[0]
