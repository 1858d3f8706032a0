"""Checkpoints as a run writes them, of a small state, on 8 simulated devices."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.training.checkpointing.checkpoints import Checkpoints

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
    key: Any


def host_state(step: int) -> State:
    """Stacked blocks, bfloat16, whole numbers, a scalar, 64 bits: what a checkpoint may hold."""
    rng = np.random.default_rng(step)
    params = {
        "blocks": {"kernel": rng.normal(size=(3, 16, 8)).astype(np.float32)},
        "norm": rng.normal(size=16).astype(jnp.bfloat16),
    }
    moments = {"mu": jax.tree.map(np.square, params), "count": np.int32(step)}
    return State(np.int32(step), params, moments, np.array([7, step], np.uint32))


def placed(state: Any, num_devices: int = 8) -> Any:
    """On devices; dims of 16 split over all of them."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("fsdp",), axis_types=(AxisType.Auto,))

    def put(leaf):
        spec = PartitionSpec(*("fsdp" if size == 16 else None for size in np.shape(leaf)))
        return jax.device_put(jnp.asarray(leaf), NamedSharding(mesh, spec))

    return jax.tree.map(put, state)


def write(folder: Path, *states: Any, about: dict | None = ABOUT) -> Path:
    """Writes states into `folder`/checkpoints, each under its step; returns `folder`."""
    for state in states:
        on_devices = placed(state)
        with Checkpoints(folder / "checkpoints", keep=9, abstract_state=on_devices, about=about) as checkpoints:
            checkpoints.save(int(state.step), on_devices)
    return folder


def damage(checkpoint: Path) -> None:
    """Flips a bit in the middle of every file of data of a checkpoint."""
    files = [path for path in (checkpoint / "state").rglob("d/*") if path.is_file()]
    assert files
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
