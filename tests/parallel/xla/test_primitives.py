"""The names of primitives are those that this JAX traces."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from spmdkit.parallel.xla.platform import by_platform
from spmdkit.parallel.xla.primitives import CALLS, COLLECTIVES, GATHERS, JOINS, MOVES, PLATFORM_CHOICE, PRODUCTS
from support import toy

EXAMPLES = {
    "moves": (
        MOVES,
        [
            lambda x: x.reshape(2, 2, 4),
            lambda x: x.T,
            lambda x: lax.squeeze(x[:1], (0,)),
            lambda x: lax.expand_dims(x, (0,)),
            lambda x: lax.slice(x, (0, 0), (2, 2)),
            lambda x: lax.split(x, (1, 3)),
            lambda x: lax.rev(x, (0,)),
            lambda x: lax.broadcast_in_dim(x, (2, 4, 4), (1, 2)),
            lambda x: x.astype(jnp.bfloat16),
            lambda x: lax.reduce_precision(x, 5, 10),
            lambda x: checkpoint_name(x, "y"),
        ],
    ),
    "joins": (JOINS, [lambda x: jnp.concatenate([x, x]), lambda x: lax.dynamic_slice(x, (0, 0), (1, 1))]),
    "products": (PRODUCTS, [lambda x: x @ x, lambda x: lax.scan(lambda y, _: (y @ x, None), x, length=2)[0]]),
    "calls": (CALLS, [jax.jit(jnp.sin), jax.checkpoint(jnp.sin)]),
}


def names(function, *arguments):
    return {equation.primitive.name for equation in jax.make_jaxpr(function)(*arguments).eqns}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_each_is_traced_under_a_name_of_its_set(kind):
    known, functions = EXAMPLES[kind]
    for function in functions:
        assert names(function, jnp.ones((4, 4))) & known


def test_collectives():
    def local(x):
        whole = lax.all_gather(x, "data", tiled=True)
        moved = lax.ppermute(x, "data", [(0, 1), (1, 0)]) + lax.all_to_all(x, "data", 0, 0, tiled=True)
        return lax.psum_scatter(whole, "data", tiled=True) + lax.psum(moved, "data")

    mapped = jax.shard_map(local, mesh=toy.mesh(data=2).backend_mesh, in_specs=P("data"), out_specs=P("data"))
    (inside,) = (each.params["jaxpr"] for each in jax.make_jaxpr(mapped)(jnp.ones((4, 4))).eqns)
    found = [equation.primitive.name for equation in getattr(inside, "jaxpr", inside).eqns]
    assert len([name for name in found if name in COLLECTIVES]) == 5
    assert len([name for name in found if name in GATHERS]) == 1


def test_a_choice_by_platform():
    assert PLATFORM_CHOICE in names(lambda x: by_platform("order", jnp.sin, jnp.cos, x), jnp.ones(2))
