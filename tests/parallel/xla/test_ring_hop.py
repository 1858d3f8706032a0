"""Rings beside a pipeline: one program on all platforms, whose hops alone travel another way on simulated devices."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import build_step, lay_out
from spmdkit.parallel.collectives import Collective
from spmdkit.parallel.context import ContextConfig
from spmdkit.parallel.pipeline import PipelineConfig
from spmdkit.parallel.tensor import TensorConfig
from spmdkit.parallel.xla.ring_hop import convert_hops, hop
from support import toy

PIPE = PipelineConfig(size=2, microbatches=2)
RINGS = {
    "attention": {"context": ContextConfig(size=4)},
    "products": {"tensor": TensorConfig(size=4, collective_matmul=True)},
    "both": {"context": ContextConfig(size=2), "tensor": TensorConfig(size=2, collective_matmul=True)},
}
SIZES = {"vocabulary": 32, "length": 8, "width": 8, "heads": 4, "kv_heads": 4, "head_width": 2, "mlp_width": 16}
EACH = [pytest.param(name, marks=() if name == "both" else pytest.mark.slow) for name in RINGS]
MODEL = transformer(TransformerConfig(**SIZES, layers=2))
ABSTRACT = toy.abstract(toy.batch(0))


@cache
def built(name, device="cpu"):
    layouts = lay_out(MODEL, {"pipe": PIPE, **RINGS[name]}, devices=[f"{device}:{index}" for index in range(8)])
    return build_step(MODEL, optax.sgd(0.1), layouts)


@cache
def traced(name, device="cpu"):
    return built(name, device).trace(ABSTRACT)


@cache
def kinds(name, device="cpu", platform="cpu"):
    """Collectives in the text of a lowered step."""
    text = traced(name, device).lower(lowering_platforms=(platform,)).as_text()
    return {kind: text.count(f"stablehlo.{kind}") for kind in ("collective_permute", "all_to_all", "all_gather")}


def along(lines, kind, pipe=False):
    return {line.axes: line for line in lines if line.kind == kind and ("pipe" in line.axes) == pipe}


@pytest.mark.slow_cases("both")
@pytest.mark.long_cases("attention", "both", "products")
@pytest.mark.parametrize("name", EACH)
def test_a_mesh_of_simulated_devices_lowers_to_the_program_of_gpus(name):
    gpus, simulated = built(name, "gpu"), built(name)
    expected = kinds(name, "gpu", platform="cuda")
    assert expected["collective_permute"] > 2  # a tick's own are two
    assert kinds(name, platform="cuda") == expected
    assert gpus.cost(ABSTRACT) == simulated.cost(ABSTRACT, platform="gpu")


@pytest.mark.slow_cases("both")
@pytest.mark.parametrize("name", EACH)
def test_on_simulated_devices_every_hop_is_an_all_to_all_of_its_group(name):
    step = built(name)
    program, gpus = kinds(name), kinds(name, platform="cuda")
    assert program["collective_permute"] == 2
    assert program["all_to_all"] + 2 == gpus["collective_permute"] + gpus["all_to_all"]
    assert program["all_gather"] == gpus["all_gather"]
    here, there = step.cost(ABSTRACT), step.cost(ABSTRACT, platform="cuda")
    sent, permuted = along(here, "all-to-all"), along(there, "collective-permute")
    assert permuted
    for axes, line in permuted.items():
        size = step.plan.mesh.axis_size(*axes)
        assert (sent[axes].count, sent[axes].bytes) == (line.count, line.bytes * size)
    assert along(here, "collective-permute", pipe=True).keys() == along(there, "collective-permute", pipe=True).keys()


def test_an_all_to_all_moves_a_part_for_each_device():
    line = Collective("collective-permute", ("context",), 3, 100)
    assert convert_hops(line, 4, "cpu") == Collective("all-to-all", ("context",), 3, 400)
    assert convert_hops(line, 4, "cuda") == line


def test_notes_list_program_differences():
    (note,) = built("both").plan.notes
    assert note == (
        "On simulated devices with strategy.pipe, strategy.context.attention=ring and "
        "strategy.tensor.collective_matmul send by all-to-all in the ring's group instead of collective-permute; GPUs "
        "run collective-permute. The rest of the program is the same."
    )
    assert "strategy.context.attention=ring sends by" in built("attention").plan.notes[0]
    assert built("both", "gpu").plan.notes == ()
    assert lay_out(MODEL, {"pipe": PIPE, "tensor": 4}, devices=toy.devices(8)).notes == ()


@pytest.mark.parametrize("direction", [1, -1])
def test_stages_hop_at_different_times(direction):
    """One stage hops three times while the other hops not at all; its gradient goes back alike."""
    mesh = toy.mesh(pipe=2, context=4).backend_mesh

    def local(x):
        turns = lax.axis_index("pipe") * 3
        y = lax.fori_loop(0, turns, lambda _, y: hop(y, "context", 4, direction), x)
        gradient = jax.grad(lambda x: (hop(x, "context", 4, direction) * y).sum())(x)
        return y, gradient

    spec = P(("pipe", "context"))
    x = np.arange(16, dtype=np.float32)
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec, spec)))
    y, gradient = map(np.asarray, mapped(jnp.asarray(x)))
    below, above = x.reshape(2, 4, 2)
    assert np.array_equal(y.reshape(2, 4, 2), [below, np.roll(above, 3 * direction, axis=0)])
    assert np.array_equal(
        gradient.reshape(2, 4, 2), [np.roll(below, -direction, axis=0), np.roll(above, 2 * direction, axis=0)]
    )
    assert not re.search("ppermute|collective_permute", mapped.lower(x).as_text())
