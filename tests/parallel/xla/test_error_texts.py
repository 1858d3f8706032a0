"""The texts that the runtime reads in JAX's errors are what this JAX says."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from spmdkit.parallel.xla.error_texts import NESTED, NOT_AN_ARRAY, UNTYPED, differing_result, matches
from support import toy


def on_two(function, in_specs, out_specs):
    mesh = toy.mesh(data=2).backend_mesh
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def grows(x):
    """A loop that starts from a constant."""
    return lax.scan(lambda sums, each: (sums + each, None), jnp.zeros(()), x)[0][None]


def chooses(x):
    """A choice between a constant and what differs."""
    return lax.cond(x[0] > 0, lambda: x, lambda: jnp.ones(2))


def replays(x):
    """A loop that was traced for values that do not differ."""
    loop, constants = jax.closure_convert(lambda x: lax.scan(lambda y, each: (y * each, y), x[0], x)[1], jnp.ones(2))
    return loop(x, *constants)


@pytest.mark.parametrize("function", [grows, chooses, replays])
def test_values_that_vary_over_different_axes(function):
    with pytest.raises((TypeError, ValueError)) as error:
        jax.eval_shape(on_two(function, P("data"), P("data")), jnp.ones(4))
    assert matches(error.value, *UNTYPED)


def test_recognizes_values_that_are_not_arrays():
    with pytest.raises(TypeError) as error:
        jax.eval_shape(lambda: {"name": "adam"})
    assert matches(error.value, NOT_AN_ARRAY)


def test_a_result_that_differs_between_devices():
    with pytest.raises(ValueError) as error:
        jax.eval_shape(on_two(lambda x: ({"up": x},), P("data"), P()), jnp.ones(4))
    assert differing_result(error.value) == ("", {"data"})
    assert differing_result(ValueError("out_specs")) is None


def test_ignores_other_errors():
    assert not matches(ValueError("shapes do not match"), NOT_AN_ARRAY, NESTED, *UNTYPED)
