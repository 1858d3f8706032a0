"""Errors of arrays on a mesh: the worst element of any copy counts, and noise of small leaves does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec
from spmdkit.parallel.verification.differences import (
    SMALL,
    SMALL_IN_FLOAT32,
    LeafError,
    copies,
    leaf_errors,
    numbers,
    relative,
    state_errors,
)

MESH = toy.mesh(data=2, fsdp=2)


def placed(spec, *parts):
    """An array whose parts on devices 0, 1, 2 and 3 are given, copies that differ included."""
    sharding = jax.sharding.NamedSharding(MESH.backend_mesh, PartitionSpec(*spec))
    devices = MESH.backend_mesh.devices.flat
    arrays = [jax.device_put(np.float32(part), device) for part, device in zip(parts, devices, strict=True)]
    shape = (len(parts[0]) * (2 if spec else 1),)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def test_relative_is_a_part_of_the_reference():
    assert relative(3.0, 2.0) == relative(-1.0, -2.0) == 0.5
    assert relative(2.0, 2.0) == 0
    assert relative(1e-3, 0.0) > 1e100
    for found, reference in ((np.nan, 1.0), (1.0, np.inf), (np.inf, np.inf)):
        assert relative(found, reference) == np.inf


def test_a_copy_that_differs_on_one_device_is_seen():
    right = placed(("fsdp",), [1, 2], [3, 4], [1, 2], [3, 4])
    wrong = placed(("fsdp",), [1, 2], [3, 4], [1, 2], [3, 6])
    reference = {"x": np.array([1.0, 2, 3, 4])}
    assert leaf_errors({"x": right}, reference) == [LeafError(0.0, "x")]
    assert leaf_errors({"x": wrong}, reference) == [LeafError(2 / 4, "x")]


def test_the_worst_leaf_comes_first_and_the_reference_is_scaled():
    found = {"a": jnp.array([2.0]), "b": {"c": jnp.array([2.0, 5.0])}}
    reference = {"a": np.array([1.0]), "b": {"c": np.array([1.0, 2.0])}}
    assert leaf_errors(found, reference, scale=2.0) == [LeafError(0.25, "b/c"), LeafError(0.0, "a")]


@pytest.mark.parametrize(("tolerance", "noise"), [(1e-9, SMALL), (1e-5, SMALL_IN_FLOAT32)])
def test_a_small_leaf_is_measured_against_a_part_of_the_largest(tolerance, noise):
    found = {"large": jnp.array([1.0]), "small": jnp.array([noise / 4])}
    reference = {"large": np.array([1.0]), "small": np.array([noise / 2])}
    (worst, _) = leaf_errors(found, reference, tolerance=tolerance)
    assert worst.path == "small"
    assert worst.relative == pytest.approx(1 / 4, rel=1e-6)


def test_a_leaf_that_rounding_moves_is_measured_by_that():
    found, reference = {"x": jnp.array([2.0]), "y": jnp.array([2.0])}, {"x": np.array([1.0]), "y": np.array([1.0])}
    other = {"x": np.array([1.0]), "y": np.array([1.0 + 1e-9])}
    (x, y) = sorted(leaf_errors(found, reference, tolerance=1e-9, moved=other), key=lambda error: error.path)
    assert x.relative == 1.0
    assert y.relative == pytest.approx(1 / 16, rel=1e-6)
    assert state_errors(found, reference, {}, tolerance=1e-9, moved=other) == [x, y]


def test_what_is_not_finite_is_infinitely_wrong():
    assert leaf_errors({"x": jnp.array([1.0, jnp.nan])}, {"x": np.array([1.0, 2.0])}) == [LeafError(np.inf, "x")]


def test_arrays_without_elements_are_right():
    assert leaf_errors({"x": jnp.zeros((0, 3))}, {"x": np.zeros((0, 3))}) == [LeafError(0.0, "x")]


def test_moments_are_measured_by_the_largest_of_their_kind():
    """A second moment is small beside a first one: against that, it would be lost."""
    params = {"w": jnp.ones(1), "b": jnp.ones(1)}
    reference = {"mu": {"w": np.array([1.0]), "b": np.array([1.0])}, "nu": {"w": np.array([1e-8]), "b": np.zeros(1)}}
    found = {"mu": {"w": jnp.array([1.0]), "b": jnp.array([1.0])}, "nu": {"w": jnp.array([2e-8]), "b": jnp.zeros(1)}}
    (worst, *others) = state_errors(found, reference, params)
    assert worst.path == "nu/w"
    assert worst.relative == pytest.approx(1.0, rel=1e-6)
    assert [each.relative for each in others] == [0, 0, 0]


def test_an_infinite_state_that_is_the_same_is_right():
    """Such as the best loss so far, before the first step."""
    assert state_errors({"best": jnp.array(jnp.inf)}, {"best": np.array(np.inf)}, {}) == [LeafError(0.0, "best")]
    assert state_errors({"best": jnp.array(1.0)}, {"best": np.array(np.inf)}, {}) == [LeafError(np.inf, "best")]


def test_keys_are_compared_by_their_data():
    key = jax.random.key(3)
    assert np.array_equal(numbers(key), jax.random.key_data(key))
    assert state_errors({"rng": key}, {"rng": jax.random.key(3)}, {}) == [LeafError(0.0, "rng")]
    assert state_errors({"rng": key}, {"rng": jax.random.key(4)}, {})[0].relative > 0


def test_copies_stand_at_their_devices_places():
    leaf = placed(("fsdp",), [1, 2], [3, 4], [5, 6], [7, 8])
    held = copies(leaf, ("data", "fsdp"), (2, 2), MESH.backend_mesh.devices.flat)
    assert held.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
