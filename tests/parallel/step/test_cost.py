"""The cost of a step: the sum of what each strategy says, and what the model moves itself."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
import toy
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import FSDPConfig, Model, lay_out
from spmdkit.parallel.collectives import Collective
from spmdkit.parallel.step.cost import step_cost

WIDTH = 8
MODEL = Model(init=lambda key: {"w": jnp.ones(WIDTH)}, loss=lambda params, batch, key: (params["w"].sum(), 1.0))


def test_the_cost_is_that_of_all_strategies():
    plan = lay_out(MODEL, {"data": 2, "fsdp": FSDPConfig(size=2, floor_bytes=1)}, devices=toy.devices(4))
    lines, size = step_cost(MODEL, plan, None, "cpu"), 4 * WIDTH
    assert Collective("all-gather", ("fsdp",), 1, size) in lines
    assert Collective("reduce-scatter", ("fsdp",), 1, size) in lines
    assert Collective("all-reduce", ("data",), 1, size // 2) in lines


def test_a_model_that_moves_needs_the_shapes_of_a_batch():
    moving = replace(toy.BLOCK_MODEL, traffic=lambda *given: None)
    plan = lay_out(toy.BLOCK_MODEL, {"data": 2}, devices=toy.devices(2))
    with pytest.raises(UserError, match="What a step moves depends on the batch here: give its shapes"):
        step_cost(moving, plan, None, "cpu")
