"""States to save and to restore, awkward on purpose, on any mesh."""

import functools
import gc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any


def unfinished_reads(test):
    """Orbax leaves reads under way where another failed: they end, with warnings, within the test."""

    @functools.wraps(test)
    def collected(*arguments, **named):
        test(*arguments, **named)
        gc.collect()

    return pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")(collected)


def sharding(num_devices: int, axis: str, *spec) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (axis,), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*spec))


def host_state(step: int) -> State:
    """Awkward on purpose: a scalar, bfloat16, an empty array, empty containers, a stacked weight, nothing regular."""
    rng = np.random.default_rng(step)
    kernel = rng.normal(size=(3, 16, 8)).astype(np.float32)
    params = {"blocks": {"kernel": kernel}, "norm": jnp.asarray(rng.normal(size=16), jnp.bfloat16), "none": {}}
    moments = (jax.tree.map(np.square, params), {"count": np.int32(step)}, np.zeros((0, 4), np.float32))
    return State(np.int32(step), params, moments)


def placed(state: State, num_devices: int, axis: str, split: bool) -> State:
    """On devices; the dim of size 16 split or everything whole."""

    def put(leaf):
        spec = [axis if split and size == 16 else None for size in leaf.shape]
        return jax.device_put(jnp.asarray(leaf), sharding(num_devices, axis, *spec))

    return jax.tree.map(put, state)


def abstract(state: State) -> State:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def assert_equal(state: State, reference: State) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(reference)
    for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(reference), strict=True):
        assert leaf.dtype == np.asarray(expected).dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected))
