"""Keys of the runtime are threefry's whatever JAX's default generator is: states and numbers are the same."""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.keys import check_seed
from spmdkit.models.generation import generate
from spmdkit.parallel import FSDPConfig, Model, build_step, lay_out
from spmdkit.parallel.verification.reference import OneDevice
from support import toy

FSDP = FSDPConfig(size=2, floor_bytes=256)


@pytest.fixture
def other_generator():
    with jax.default_prng_impl("rbg"):
        yield


def block(params, x, key):
    """With a mask that all rows share: no part of it depends on where a row is."""
    kept = True if key is None else jax.random.bernoulli(key, 0.5, x.shape[1:])[None]
    return jnp.where(kept, toy.block(params, x, key), x)


MODEL = replace(toy.DRAWN_MODEL, block=block)


def one_step(strategy, seed=3):
    step = build_step(MODEL, optax.sgd(0.5), lay_out(MODEL, strategy, devices=toy.devices(2)))
    state = step.init(seed)
    assert (state.key.shape, state.key.dtype) == ((2,), np.uint32)
    first = jax.device_get(state.params)
    state, metrics = step(state, toy.batch(0))
    return first, jax.device_get(state.params), float(metrics.loss)


STRATEGIES = {"fsdp": {"fsdp": FSDP}, "pipe": {"pipe": {"size": 2, "microbatches": 2}}}


@cache
def expected(name):
    with jax.default_prng_impl("threefry2x32"):
        return one_step(STRATEGIES[name])


@pytest.mark.slow_cases("fsdp", "pipe")
@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_ignore_the_default_generator(name, other_generator):
    ours, theirs = one_step(STRATEGIES[name]), expected(name)
    assert ours[2] == theirs[2]
    assert jax.tree.all(jax.tree.map(np.array_equal, ours[:2], theirs[:2]))


@pytest.mark.slow
def test_the_reference_ignores_the_default_generator(other_generator):
    alone = OneDevice(MODEL, optax.sgd(0.5), clip_norm=0.0, compute="float32", seed=3)
    first = alone.init("float32")
    assert jax.tree.all(jax.tree.map(np.array_equal, first, expected("fsdp")[0]))
    reports = alone.train(first, [toy.batch(0)]).reports
    assert reports[0]["loss"] == pytest.approx(expected("fsdp")[2], rel=1e-5)


def drawn():
    """Tokens of a model that knows nothing, compiled anew."""

    def predict(params, batch):
        return jnp.zeros((*batch["inputs"].shape, 50))

    flat = Model(init=lambda key: (), loss=lambda params, batch, key: (0.0, 0.0), predict=predict)
    return generate(flat, (), [1], length=8, window=4, temperature=1.0)


@pytest.fixture(scope="module")
def expected_text():
    return drawn()


def test_samples_ignore_the_default_generator(expected_text, other_generator):
    assert drawn() == expected_text


@pytest.mark.parametrize(
    ("seed", "text"),
    [(-1, "seed=-1 must be from 0 to 2**32 - 1 = 4294967295"), (2**32, "seed=4294967296 must")],
)
def test_rejects_seeds_out_of_range(seed, text):
    with pytest.raises(UserError, match=f"^{re.escape(text)}"):
        check_seed(seed)
