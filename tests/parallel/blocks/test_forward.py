"""Gathered blocks are dropped after use and gathered again in backward, however the loop over blocks is unrolled."""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import FSDPConfig, census
from support import toy
from support.order import unordered

WIDTH = 128
BLOCK_BYTES = 2 * WIDTH * 4 * WIDTH * 4
"""Of one block's parameters, whole."""


def model(layers, unroll):
    """The toy with other sizes."""

    def init(key):
        del key
        return {
            "embed": {"table": jnp.full((toy.VOCABULARY, WIDTH), 0.1)},
            "blocks": {
                "up": jnp.full((layers, WIDTH, 4 * WIDTH), 0.1),
                "down": jnp.full((layers, 4 * WIDTH, WIDTH), 0.1),
                "scale": jnp.ones((layers, WIDTH)),
            },
            "head": {"out": jnp.full((WIDTH, toy.VOCABULARY), 0.1)},
        }

    return replace(toy.BLOCK_MODEL, init=init, num_blocks=layers, scan_unroll=unroll)


@cache
def compiled(layers, unroll, data=1, accumulate=1, remat="none"):
    """The step, its program, and the whole blocks' worth of its temporaries; kept for all tests."""
    strategy = {"fsdp": FSDPConfig(size=4 // data, floor_bytes=1024), **({"data": data} if data > 1 else {})}
    step = toy.build(strategy, model=model(layers, unroll), accumulate=accumulate, remat=remat)
    program = step.compile(toy.abstract(toy.batch(0)))
    return step, program.as_text(), program.memory_analysis().temp_size_in_bytes / BLOCK_BYTES


slow = pytest.mark.slow
CASES = {
    "turns of 1": (4, 1),
    "turns of 2": (4, 2),
    "one turn": (4, 4),
    "more than there are": (2, 9),
    "a rest": (3, 2),
    "one block": (1, 1),
    "one turn, microbatches": (4, 4, 1, 2),
    "one block, microbatches": (1, 1, 1, 2),
    "one turn, copies of groups": (4, 4, 2),
    "one block, copies of groups": (1, 1, 2),
    "one turn, dots": (4, 4, 1, 1, "dots"),
    "one turn, full": (4, 4, 1, 1, "full"),
    "one turn, full, microbatches": (4, 4, 1, 2, "full"),
    "one block, full": (1, 1, 1, 1, "full"),
}


@pytest.mark.slow_cases(*sorted(CASES.keys() - {"one turn, full"}))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_block_is_gathered_forward_and_backward(case):
    step, text, _ = compiled(*case)
    lines = census(text, step.plan.mesh)
    gathers = sum(line.count for line in lines if line.kind == "all-gather")
    assert gathers == 2 + 2 * 2 * case[0] * step.accumulate  # the table, the head; twice the two of each block
    assert lines == step.cost()
    assert unordered(text) == []


@pytest.mark.slow_cases("few0-many0", "few1-many1")
@pytest.mark.parametrize(
    ("few", "many"),
    [
        ((1, 1), (4, 4)),
        ((1, 1, 1, 2), (4, 4, 1, 2)),
        pytest.param((2, 1), (4, 1), marks=slow),
        pytest.param((1, 1, 1, 1, "full"), (4, 4, 1, 1, "full"), marks=slow),
        pytest.param((2, 2, 1, 1, "dots"), (4, 4, 1, 1, "dots"), marks=slow),
        pytest.param((2, 2, 1, 2, "full"), (4, 4, 1, 2, "full"), marks=slow),
    ],
)
def test_memory_does_not_grow_by_whole_blocks(few, many):
    """A layer adds a quarter for its shard of the gradients, some activations, and not 1 for its whole parameters."""
    grown = (compiled(*many)[2] - compiled(*few)[2]) / (many[0] - few[0])
    assert 0.25 <= grown < 0.75


def test_other_platforms_are_held_back_by_barriers():
    """One keeps gathers inside the loop over microbatches; then one for it, the head, and each block."""
    step, _, _ = compiled(4, 4, 1, 2)
    text = step.lower(toy.abstract(toy.batch(0)), platform="cuda").as_text()
    barriers = 0
    for function in re.split(r"func\.func \w+ @", text):
        calls = len(re.findall(rf"call @{function.split('(')[0]}\(", text))
        barriers += function.count("stablehlo.optimization_barrier") * max(1, calls)
    assert barriers == 2 + 1 + 4


@pytest.mark.slow_cases("none")
@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=slow)])
def test_numbers_of_one_turn_are_those_of_one_device(remat, float64):
    once = replace(toy.BLOCK_MODEL, scan_unroll=toy.BLOCKS)
    strategy = {"fsdp": FSDPConfig(size=4, floor_bytes=256)}
    params, *expected = toy.on_one_device(toy.BLOCK_MODEL, toy.batch(0), "float64")
    step = toy.build(strategy, optax.sgd(1.0), once, remat=remat, accumulate=2, precision=toy.FLOAT64)
    state, metrics = step(step.init(0, params), toy.batch(0))
    found = [metrics.loss, jax.tree.map(np.subtract, params, state.params)]
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, found, expected))) < 1e-9
