"""The parts of a model: what a block gathers, in which dtype it computes, and what is computed again."""

import jax
import numpy as np
from jax.sharding import PartitionSpec
from spmdkit.parallel import FSDPConfig, Precision, lay_out
from spmdkit.parallel.blocks.gathered_block import REMAT_POLICIES, block_layouts
from spmdkit.parallel.blocks.model_parts import make_parts, recomputes_output
from spmdkit.parallel.data import make_varying
from spmdkit.parallel.fsdp import gather
from support import toy
from support.verification import BLOCK_MODEL

LAYOUTS = lay_out(BLOCK_MODEL, {"fsdp": FSDPConfig(size=2, floor_bytes=256)}, devices=toy.devices(2))
KEEPING = lay_out(BLOCK_MODEL, {"fsdp": FSDPConfig(size=2, floor_bytes=256, keep="step")}, devices=toy.devices(2))
PARAMS = jax.tree.map(np.asarray, BLOCK_MODEL.init(jax.random.key(0)))


def block_of(blocks, index):
    return jax.tree.map(lambda leaf: leaf[index], blocks)


def block_alone(*, gathered):
    """The operations of one block, given its shards or what was gathered of them for the whole step."""
    precision = Precision(compute="bfloat16")
    plan = toy.with_options(KEEPING if gathered else LAYOUTS, remat="full", precision=precision)
    parts = make_parts(BLOCK_MODEL, plan)
    layouts, _ = block_layouts(LAYOUTS)
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


def test_block_gathers_its_parameters_unless_they_are_kept():
    assert block_alone(gathered=False).count("all_gather[") == 2
    assert block_alone(gathered=True).count("all_gather[") == 0


def test_block_computes_in_the_compute_dtype():
    text = block_alone(gathered=False)
    assert "bf16" in text.split("dot_general")[0]
    assert "f32[8,8,16]" not in text


def test_recomputes_output_if_a_block_gathers_or_keeps_products():
    alone = lay_out(BLOCK_MODEL, {"data": 2}, devices=toy.devices(2))
    found = {remat: recomputes_output(toy.with_options(alone, remat=remat)) for remat in REMAT_POLICIES}
    assert found == {"none": False, "dots": True, "selective": True, "local": True, "full": False}
    assert recomputes_output(LAYOUTS)
    assert make_parts(BLOCK_MODEL, LAYOUTS).recomputes_output
    assert not make_parts(BLOCK_MODEL, alone).gathers
