"""The texts that the runtime reads in JAX's errors are what this JAX says."""

import jax
import jax.numpy as jnp
import pytest
import toy
from jax import lax
from jax.sharding import PartitionSpec as P
from spmdkit.parallel.xla.error_texts import NESTED, NO_ARRAY, NO_MESH, UNTYPED, Differing, differing_result, says


def on_two(function, in_specs, out_specs):
    mesh = toy.mesh(data=2).backend_mesh
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def test_a_call_without_a_mesh():
    with pytest.raises(ValueError) as error:
        jax.shard_map(lambda x: x, in_specs=P(), out_specs=P())(jnp.ones(2))
    assert says(error.value, NO_MESH)


def grows(x):
    """A loop that starts from a constant."""
    return lax.scan(lambda sums, each: (sums + each, None), jnp.zeros(()), x)[0][None]


def chooses(x):
    """A choice between a constant and what differs."""
    return lax.cond(x[0] > 0, lambda: x, lambda: jnp.ones(2))


@pytest.mark.parametrize("function", [grows, chooses])
def test_values_that_vary_over_different_axes(function):
    with pytest.raises((TypeError, ValueError)) as error:
        jax.eval_shape(on_two(function, P("data"), P("data")), jnp.ones(4))
    assert says(error.value, *UNTYPED)


def test_what_is_no_array():
    with pytest.raises(TypeError) as error:
        jax.eval_shape(lambda: {"name": "adam"})
    assert says(error.value, NO_ARRAY)


def test_a_result_that_differs_between_devices():
    with pytest.raises(ValueError) as error:
        jax.eval_shape(on_two(lambda x: ({"up": x},), P("data"), P()), jnp.ones(4))
    found = differing_result(error.value)
    assert isinstance(found, Differing)
    assert found.found == ("data",)
    assert "data" not in found.expected
    assert differing_result(ValueError("out_specs")) is None


def test_another_error_says_none_of_it():
    assert not says(ValueError("shapes do not match"), NO_MESH, NO_ARRAY, NESTED, *UNTYPED)
