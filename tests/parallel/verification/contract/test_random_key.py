"""The generator of the contract's random numbers: drawn like others, by key, shape and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.parallel.verification.contract.random_key import check_key, shared_key


@pytest.fixture
def key():
    return check_key(jax.random.key(3))


def test_numbers_are_distributed_as_asked(key):
    normal = np.asarray(jax.random.normal(jax.random.split(key, 5)[3], (1000, 10)))
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 1) < 0.05
    assert abs(np.corrcoef(normal[:-1].ravel(), normal[1:].ravel())[0, 1]) < 0.05
    assert abs(float(jnp.mean(jax.random.bernoulli(key, 0.3, (10_000,)))) - 0.3) < 0.02


def test_keys_that_differ_draw_numbers_that_differ(key):
    keys = [key, jax.random.fold_in(key, 0), jax.random.fold_in(key, 1), *jax.random.split(key, 3)]
    drawn = {tuple(jax.random.bits(key, (4,)).tolist()) for key in [*keys, check_key(jax.random.key(4))]}
    assert len(drawn) == 7
    folded = jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(key, n), ()))(jnp.arange(1000))
    assert len(np.unique(folded)) > 990
    assert abs(float(folded.mean()) - 0.5) < 0.05


def test_a_row_draws_the_same_whatever_is_beside_it(key):
    def draw(rows):
        return jax.vmap(lambda row: jax.random.bernoulli(jax.random.fold_in(key, row), 0.5, (16,)))(rows)

    whole = draw(jnp.arange(4))
    assert np.array_equal(draw(jnp.array([2, 0])), whole[jnp.array([2, 0])])


@pytest.mark.parametrize("bits", ["uint8", "uint16", "uint32"])
def test_words_of_every_width_fill_it(key, bits):
    drawn = np.asarray(jax.random.bits(key, (4096,), bits))
    assert drawn.dtype == bits
    assert drawn.max() > 0.99 * np.iinfo(bits).max


def test_an_older_key_is_taken_too():
    assert check_key(jax.random.PRNGKey(3)) == check_key(jax.random.key(3))


def test_a_shared_key_draws_one_small_number_for_all_rows(key):
    shared = shared_key(key)
    rows = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(shared, row), (3,)))(jnp.arange(4))
    assert len(np.unique(rows)) == 1
    assert 0 <= float(rows[0, 0]) < 1 / 16
    first, second = jax.random.split(shared)
    assert first == second != shared
