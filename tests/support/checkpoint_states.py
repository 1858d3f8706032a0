"""States to save and restore on any mesh, and checkpoints of them."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.checkpoints.manager import Checkpoints

ABOUT = {
    "versions": {"spmdkit": "0.1.0", "jax": "9.9"},
    "model": "toy",
    "mesh": {"fsdp": 8},
    "devices": 8,
    "processes": 1,
}


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    key: Any = ()


def sharding(num_devices: int, axis: str, *spec) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (axis,), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*spec))


def host_state(step: int) -> State:
    """An awkward state: a scalar, bfloat16, an empty array, empty containers, a stacked weight."""
    rng = np.random.default_rng(step)
    kernel = rng.normal(size=(3, 16, 8)).astype(np.float32)
    params = {"blocks": {"kernel": kernel}, "norm": jnp.asarray(rng.normal(size=16), jnp.bfloat16), "none": {}}
    moments = (jax.tree.map(np.square, params), {"count": np.int32(step)}, np.zeros((0, 4), np.float32))
    return State(np.int32(step), params, moments)


def run_state(step: int) -> State:
    """A state as a run has it: stacked blocks, bfloat16, integers, a scalar, a key."""
    rng = np.random.default_rng(step)
    params = {
        "blocks": {"kernel": rng.normal(size=(3, 16, 8)).astype(np.float32)},
        "norm": rng.normal(size=16).astype(jnp.bfloat16),
    }
    moments = {"mu": jax.tree.map(np.square, params), "count": np.int32(step)}
    return State(np.int32(step), params, moments, np.array([7, step], np.uint32))


def placed(state: Any, num_devices: int = 8, axis: str = "fsdp", split: bool = True) -> Any:
    """On devices; dims of size 16 split over all of them, or everything whole."""

    def put(leaf):
        spec = [axis if split and size == 16 else None for size in np.shape(leaf)]
        return jax.device_put(jnp.asarray(leaf), sharding(num_devices, axis, *spec))

    return jax.tree.map(put, state)


def abstract(state: State) -> State:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def assert_equal(state: State, reference: State) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(reference)
    for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(reference), strict=True):
        assert leaf.dtype == np.asarray(expected).dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected))


def opened(folder: Path, state: Any = None) -> Checkpoints:
    """The checkpoints of a folder, for a state on one device."""
    return Checkpoints(folder, keep=3, abstract_state=abstract(placed(state or host_state(0), 1, "data", False)))


def write(folder: Path, *states: Any, about: dict | None = ABOUT) -> Path:
    """Writes states into `folder`/checkpoints, each under its step; returns `folder`."""
    for state in states:
        on_devices = placed(state)
        with Checkpoints(folder / "checkpoints", keep=9, abstract_state=on_devices, about=about) as checkpoints:
            checkpoints.save(int(state.step), on_devices)
    return folder
