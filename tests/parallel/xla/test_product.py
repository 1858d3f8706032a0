"""The gradient that is written out is autodiff's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.parallel.xla.product import product, weight_first


@pytest.mark.parametrize(("width", "columns"), [(4, 5), (5, 4), (4, 4)])
def test_value_and_gradients_are_those_of_autodiff(width, columns, float64):
    """The gradient of the matrix is written in two ways: one if it has more rows than columns."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight, cotangent = (
        jax.random.normal(key, shape, jnp.float64)
        for key, shape in zip(keys, ((2, 3, width), (width, columns), (2, 3, columns)), strict=True)
    )
    ours, expected = jax.vjp(product, x, weight), jax.vjp(jnp.matmul, x, weight)
    np.testing.assert_array_equal(ours[0], expected[0])
    for mine, theirs in zip(ours[1](cotangent), expected[1](cotangent), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=1e-13)


def test_backward_goes_on_once_the_matrix_has_its_gradient():
    """The gradient of the activations alone takes one product; made after that of the matrix, it takes two."""

    def gradient(factors):
        def backward(x, weight, cotangent):
            return jax.vjp(lambda x, weight: jnp.matmul(*factors(x, weight)), x, weight)[1](cotangent)[0]

        return jax.jit(backward)

    x, weight, cotangent = jnp.ones((2, 3)), jnp.full((3, 4), 2.0), jnp.ones((2, 4))
    plain, ours = gradient(lambda x, weight: (x, weight)), gradient(weight_first)
    products = [each.lower(x, weight, cotangent).compile().as_text().count(" dot(") for each in (plain, ours)]
    assert products == [1, 2]
    np.testing.assert_array_equal(ours(x, weight, cotangent), plain(x, weight, cotangent))
