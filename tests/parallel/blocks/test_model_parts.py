"""The parts of a model are the model, with the gathers and casts of its parameters inside them."""

import jax
import numpy as np
import pytest
import toy
from jax import lax
from jax.sharding import PartitionSpec
from planted import BLOCK_MODEL
from spmdkit.parallel import FSDPConfig, Precision, lay_out
from spmdkit.parallel.blocks.forward import without_blocks
from spmdkit.parallel.blocks.gathered_block import without_block_dim
from spmdkit.parallel.blocks.model_parts import make_parts, recomputes_output
from spmdkit.parallel.data import make_varying
from spmdkit.parallel.fsdp import gather

LAYOUTS = lay_out(BLOCK_MODEL, {"fsdp": FSDPConfig(size=2, floor_bytes=256)}, devices=toy.devices(2))
KEEPING = lay_out(BLOCK_MODEL, {"fsdp": FSDPConfig(size=2, floor_bytes=256, keep="step")}, devices=toy.devices(2))
PARAMS = jax.tree.map(np.asarray, BLOCK_MODEL.init(jax.random.key(0)))


def block_of(blocks, index):
    return jax.tree.map(lambda leaf: leaf[index], blocks)


def in_parts(params, batch, *, remat="none", precision=Precision()):  # noqa: B008  (frozen)
    """(sum, weight) of a device's rows: embed, each block in its turn, head."""
    parts = make_parts(BLOCK_MODEL, LAYOUTS, remat=remat, precision=precision)
    outside = without_blocks(params)
    whole = gather(outside, without_blocks(LAYOUTS.table.layouts), LAYOUTS.gather_axes, precision)
    x = parts.embed({name: outside[name] for name in parts.embed_reads}, whole, batch, None)
    for index in range(toy.BLOCKS):
        x = parts.block(block_of(params["blocks"], index), None, x, None)
    return parts.head({name: outside[name] for name in parts.head_reads}, whole, x, batch, None)[:2]


def on_mesh(function):
    """A function of a device's parameters and rows that returns sums and something laid out as the parameters."""
    specs = LAYOUTS.manual_specs(LAYOUTS.table)

    def run(params, batch):
        return function(make_varying(params, LAYOUTS.table.layouts, LAYOUTS.manual_axes), batch)

    return jax.shard_map(
        run,
        mesh=LAYOUTS.mesh.backend_mesh,
        in_specs=(specs, PartitionSpec("fsdp")),
        out_specs=((PartitionSpec(), PartitionSpec()), specs),
    )


@pytest.mark.parametrize("remat", ["none", "full"])
def test_sums_and_gradients_are_those_of_the_model(remat):
    def run(params, batch):
        sums, gradients = jax.value_and_grad(lambda *given: in_parts(*given, remat=remat), has_aux=True)(params, batch)
        replicated = jax.tree.map(
            lambda leaf, layout: leaf if layout.used_axes else lax.psum(leaf, "fsdp"), gradients, LAYOUTS.table.layouts
        )
        return lax.psum(sums, "fsdp"), replicated

    sums, gradients = jax.jit(on_mesh(run))(PARAMS, toy.batch(0))
    expected, wanted = jax.jit(jax.value_and_grad(BLOCK_MODEL.loss, has_aux=True))(PARAMS, toy.batch(0), None)
    assert np.allclose(sums, expected, rtol=1e-5)
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, gradients, wanted))) < 1e-5


def block_alone(*, gathered):
    """The operations of one block, given its shards or what was gathered of them for the whole step."""
    precision = Precision(compute="bfloat16")
    parts = make_parts(BLOCK_MODEL, KEEPING if gathered else LAYOUTS, remat="full", precision=precision)
    layouts = jax.tree.map(without_block_dim, LAYOUTS.table.layouts["blocks"])
    found = []

    def run(params, batch):
        params = make_varying(params, LAYOUTS.table.layouts, LAYOUTS.manual_axes)
        x = batch["inputs"][..., None].astype("bfloat16") * np.ones((1, 1, toy.WIDTH), "bfloat16")
        shards = block_of(params["blocks"], 0)
        whole = gather(shards, layouts, ("fsdp",), precision) if gathered else None
        found.append(jax.make_jaxpr(parts.block)(shards, whole, x, None))
        return x

    specs = LAYOUTS.manual_specs(LAYOUTS.table), PartitionSpec("fsdp")
    mesh = LAYOUTS.mesh.backend_mesh
    jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[1]), PARAMS, toy.batch(0))
    return str(found[0])


def test_a_block_gathers_its_own_parameters_unless_they_are_there():
    assert block_alone(gathered=False).count("all_gather[") == 2
    assert block_alone(gathered=True).count("all_gather[") == 0


def test_a_block_computes_in_the_dtype_of_the_model():
    text = block_alone(gathered=False)
    assert "bf16" in text.split("dot_general")[0]
    assert "f32[8,8,16]" not in text


def test_what_goes_with_the_output_of_a_block_is_known_where_it_gathers_nothing():
    alone = lay_out(BLOCK_MODEL, {"data": 2}, devices=toy.devices(2))
    assert [recomputes_output(alone, remat) for remat in ("none", "dots", "full")] == [False, True, False]
    assert recomputes_output(LAYOUTS, "none")
    assert make_parts(BLOCK_MODEL, LAYOUTS, remat="none", precision=Precision()).recomputes_output
    assert not make_parts(BLOCK_MODEL, alone, remat="none", precision=Precision()).gathers
