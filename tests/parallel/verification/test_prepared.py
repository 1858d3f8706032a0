"""A model made fit to show mistakes: no parameter at 0 or at 1, its sums wide enough, all else as it was."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from planted import BLOCK_MODEL
from spmdkit.parallel import Model
from spmdkit.parallel.model import ParallelContext
from spmdkit.parallel.verification.prepared import JITTER, prepared

GIVEN = {"ones": jnp.ones((3, 4)), "steps": jnp.arange(3), "zeros": jnp.zeros(5), "zeros_too": jnp.zeros(5)}


def narrow_loss(params, batch, key):
    return jnp.bfloat16(2.0), jnp.bfloat16(4.0)


MODEL = Model(init=lambda key: GIVEN, loss=narrow_loss)


def test_parameters_are_moved_off_zeros_and_ones_by_a_little():
    moved = jax.jit(prepared(MODEL, "float32").init)(jax.random.key(0))
    assert 0 < np.abs(moved["ones"] - 1).max() <= JITTER * 1.0001
    assert (moved["zeros"] > 0).all()
    assert moved["zeros"].max() <= 2.5 * JITTER
    for name in ("ones", "zeros"):
        assert len(np.unique(moved[name])) == moved[name].size, "no two parts are the same in another order"
    assert not np.array_equal(moved["zeros"], moved["zeros_too"])


def test_whole_numbers_stay_and_dtypes_too():
    moved = prepared(MODEL, "float64").init(jax.random.key(0))
    assert moved["steps"].tolist() == [0, 1, 2]
    assert jax.tree.map(lambda leaf: leaf.dtype, moved) == jax.tree.map(lambda leaf: leaf.dtype, GIVEN)


def test_every_program_moves_alike():
    """Whether it is compiled, or runs operation by operation."""
    init = prepared(MODEL, "float32").init
    assert jax.tree.all(jax.tree.map(np.array_equal, init(jax.random.key(0)), jax.jit(init)(jax.random.key(0))))


def test_sums_travel_in_the_dtype_of_the_gradients():
    total, weight = prepared(MODEL, "float32").loss({}, {}, None)
    assert (total.dtype, weight.dtype, float(total), float(weight)) == (jnp.float32, jnp.float32, 2, 4)


def test_sums_are_never_narrowed(float64):
    wide = replace(MODEL, loss=lambda *given: (jnp.float64(2.0), jnp.float64(4.0)))
    assert [each.dtype for each in prepared(wide, "float32").loss({}, {}, None)] == [jnp.float64] * 2


def test_a_model_of_blocks_stays_one_and_so_does_what_it_makes_of_a_mesh():
    asked = []

    def parallelize(parallel):
        asked.append(parallel)
        return replace(BLOCK_MODEL, init=lambda key: GIVEN)

    given = replace(BLOCK_MODEL, parallelize=parallelize)
    made = prepared(given, "float32")
    assert (made.embed, made.block, made.num_blocks) == (given.embed, given.block, given.num_blocks)
    split = made.parallelize(ParallelContext())
    assert asked == [ParallelContext()]
    assert not np.array_equal(jax.jit(split.init)(jax.random.key(0))["ones"], GIVEN["ones"])


def test_what_is_no_pair_is_left_to_be_refused():
    assert float(prepared(replace(MODEL, loss=lambda *given: jnp.float32(3)), "float32").loss({}, {}, None)) == 3
