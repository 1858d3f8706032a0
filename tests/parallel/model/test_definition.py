"""A model's whole loss is embed, each block with a key of its own, and head."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.parallel import BlockModel

BLOCKS = 3
PARAMS = {
    "embed": {"by": jnp.float32(2)},
    "blocks": {"add": jnp.array([1.0, 10.0, 100.0])},
    "head": {"by": jnp.float32(5)},
}
BATCH = {"x": jnp.array([1.0, 2.0]), "weights": jnp.array([1.0, 0.5])}


def embed(groups, batch, key):
    assert set(groups) == {"embed"}
    return batch["x"] * groups["embed"]["by"]


def block(params, x, key):
    return 2 * x + params["add"] + (0 if key is None else jax.random.uniform(key))


def head(groups, x, batch, key):
    assert set(groups) == {"head"}
    return (x * batch["weights"]).sum() * groups["head"]["by"], batch["weights"].sum()


MODEL = BlockModel(init=lambda key: PARAMS, embed=embed, block=block, head=head, num_blocks=BLOCKS)


def by_hand(key=None):
    x = np.array([2.0, 4.0])
    for index in range(BLOCKS):
        drawn = 0 if key is None else float(jax.random.uniform(jax.random.fold_in(key, index)))
        x = 2 * x + 10**index + drawn
    return 5 * (x[0] + x[1] / 2)


@pytest.mark.parametrize("unroll", [1, 2, 9])
def test_blocks_run_one_after_another_however_many_a_turn_holds(unroll):
    total, weight = replace(MODEL, scan_unroll=unroll).loss(PARAMS, BATCH, None)
    assert (float(total), float(weight)) == (pytest.approx(by_hand(), rel=1e-6), 1.5)


def test_each_block_has_a_key_of_its_own():
    key = jax.random.key(7)
    total, _ = jax.jit(MODEL.loss)(PARAMS, BATCH, key)
    assert float(total) == pytest.approx(by_hand(key), rel=1e-6)


def test_embed_and_head_see_the_groups_they_read():
    def tied(groups, x, batch, key):
        assert set(groups) == {"embed", "head"}
        return x.sum() * groups["embed"]["by"], batch["weights"].sum()

    total, _ = replace(MODEL, head=tied, head_reads=("embed", "head")).loss(PARAMS, BATCH, None)
    assert float(total) == pytest.approx(2 * (8 * 6 + 2 * (4 * 1 + 2 * 10 + 100)))
