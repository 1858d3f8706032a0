"""Products in a ring are those of all positions and all columns at once, and so are their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from spmdkit.parallel.xla.collective_matmul import ring_gather_products, ring_product_scatter
from support import toy

ROWS, POSITIONS, WIDTH, COLUMNS = 2, 12, 3, 24


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


def on_ring(size, function, in_specs, out_specs):
    mesh = toy.mesh(tensor=size).backend_mesh
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def assert_same(ring, plain, direction, *arguments):
    """Values and gradients, of global arrays."""

    def run(function):
        value, backward = jax.vjp(function, *arguments)
        return value, backward(direction)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12),
        run(ring),
        jax.jit(run, static_argnums=0)(plain),
    )


@pytest.mark.slow_cases("3", "4")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gather(size, float64):
    x, weights = normal(ROWS, POSITIONS, WIDTH), (normal(WIDTH, COLUMNS), normal(WIDTH, 2 * COLUMNS))
    columns = P(None, "tensor"), P(None, "tensor")

    def local(x, *weights):
        return jnp.concatenate(ring_gather_products(x, weights, "tensor", size), axis=2)

    ring = on_ring(size, local, (P(None, "tensor"), *columns), P(None, None, "tensor"))

    def plain(x, *weights):
        parts = [jnp.split(x @ weight, size, axis=2) for weight in weights]
        return jnp.concatenate([part for own in zip(*parts, strict=True) for part in own], axis=2)

    assert_same(ring, plain, normal(ROWS, POSITIONS, 3 * COLUMNS), x, *weights)


@pytest.mark.slow_cases("3", "4")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_scatter(size, float64):
    h, weight = normal(ROWS, POSITIONS, COLUMNS), normal(COLUMNS, WIDTH)

    def local(h, weight):
        return ring_product_scatter(h, weight, "tensor", size)

    ring = on_ring(size, local, (P(None, None, "tensor"), P("tensor")), P(None, "tensor"))
    assert_same(ring, jnp.matmul, normal(ROWS, POSITIONS, WIDTH), h, weight)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_part_is_sent_once(size):
    columns = P(None, "tensor")

    def gathered(x, weight):
        return ring_gather_products(x, [weight], "tensor", size)[0]

    def scattered(h, weight):
        return ring_product_scatter(h, weight, "tensor", size)

    gather = on_ring(size, gathered, (columns, columns), P(None, None, "tensor"))
    scatter = on_ring(size, scattered, (P(None, None, "tensor"), P("tensor")), columns)
    for ring, weight in ((gather, normal(WIDTH, COLUMNS)), (scatter, normal(COLUMNS, WIDTH))):
        traced = jax.make_jaxpr(ring)(normal(ROWS, POSITIONS, len(weight)), weight)
        assert str(traced).count("ppermute[") == size - 1
