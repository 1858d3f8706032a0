"""A state's shapes and shardings, and seeds that keys can be made of."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec
from spmdkit.parallel import FSDPConfig, build_step, lay_out
from spmdkit.parallel.step.state import seed_problem
from support import toy
from support.verification import BLOCK_MODEL


@pytest.fixture(scope="module")
def step():
    layouts = lay_out(BLOCK_MODEL, {"fsdp": FSDPConfig(size=2, floor_bytes=256)}, devices=toy.devices(2))
    return build_step(BLOCK_MODEL, optax.adamw(1e-3), layouts)


def test_moments_lie_where_their_parameters_do(step):
    state = step.abstract_state()
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state.params)
    assert specs["blocks"]["up"] == PartitionSpec(None, "fsdp")
    (adam, *_) = state.opt_state
    for moment in (adam.mu, adam.nu):
        assert jax.tree.map(lambda leaf: leaf.sharding.spec, moment) == specs
        assert jax.tree.map(lambda leaf: leaf.shape, moment) == jax.tree.map(lambda leaf: leaf.shape, state.params)


def test_what_every_device_holds_is_replicated(step):
    state = step.abstract_state()
    for leaf in (state.step, state.key, state.opt_state[0].count):
        assert leaf.sharding.is_fully_replicated
    assert (state.step.dtype, state.key.dtype, state.key.shape) == (jnp.int32, jnp.uint32, (2,))
    assert state.extra == ()


def test_an_abstract_state_is_that_of_the_first_one(step):
    promised = jax.tree.leaves(step.abstract_state())
    given = jax.tree.leaves(step.init(0, jax.tree.map(lambda leaf: jnp.ones(leaf.shape), step.abstract_state().params)))
    assert [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in promised] == [
        (leaf.shape, leaf.dtype, leaf.sharding) for leaf in given
    ]


@pytest.mark.parametrize(
    ("seed", "text"),
    [
        (-1, "train.seed=-1 must be from 0 to 2**32 - 1 = 4294967295"),
        (2**32, "train.seed=4294967296 must"),
    ],
)
def test_rejects_seeds_out_of_range(seed, text):
    assert seed_problem(seed, "train.seed").startswith(text)
