"""Sends an array to the next device of a ring, in ring attention and in products that overlap a gather or scatter.

    in general               collective-permute: each device to its neighbor
    simulated devices        all-to-all within the ring, with zeros for all other devices: N times the bytes
    with a pipeline          (the trick `hop_in_groups` of `platform.py`)

XLA:CPU's collective-permute waits for every device of the mesh, including devices of other stages, which may be running
another part of a tick. Only in this case does a hop use another collective. The rest of the program and the bits of the
results are the same.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..collectives import Collective, axis_size
from .platform import by_platform, uses

PIPE = "pipe"


def hop(x: Array, axis: str, size: int, direction: int = 1) -> Array:
    """Sends an array to the next device of a ring and returns the array of the previous one. Inside `shard_map`.

    Args:
        x: A per-device array of any shape and dtype.
        axis: The mesh axis of the ring.
        size: N, the size of the axis.
        direction: 1 towards higher indices, -1 towards lower.

    Returns:
        The neighbor's array; its gradient travels in the opposite direction in the same way.
    """
    return _hop(x, axis, size, direction) if axis_size(PIPE) > 1 else send_by_permute(x, axis, size, direction)


def send_by_permute(x: Array, axis: str, size: int, direction: int) -> Array:
    """Sends by collective-permute."""
    return lax.ppermute(x, axis, [(source, (source + direction) % size) for source in range(size)])


def send_by_all_to_all(x: Array, axis: str, size: int, direction: int) -> Array:
    """Sends by all-to-all, in which devices outside the ring do not take part."""
    rank = lax.axis_index(axis)
    for_each = (jnp.arange(size) == (rank + direction) % size).astype(x.dtype)
    from_each = lax.all_to_all(jnp.multiply.outer(for_each, x), axis, split_axis=0, concat_axis=0)
    return lax.dynamic_index_in_dim(from_each, (rank - direction) % size, 0, keepdims=False)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _hop(x: Array, axis: str, size: int, direction: int) -> Array:
    ways: Any = {"axis": axis, "size": size, "direction": direction}
    return by_platform("hop_in_groups", partial(send_by_all_to_all, **ways), partial(send_by_permute, **ways), x)


def _hop_backward(axis: str, size: int, direction: int, _: None, gradient: Array) -> tuple[Array]:
    return (_hop(gradient, axis, size, -direction),)


_hop.defvjp(lambda *arguments: (_hop(*arguments), None), _hop_backward)


def convert_hops(line: Collective, size: int, platform: str) -> Collective:
    """Converts a line of a model's `traffic` to the actual collective of a hop in a pipeline.

    Args:
        line: The line; only collective-permutes change.
        size: N, the number of devices in its group.
        platform: The platform of the step.
    """
    if not uses("hop_in_groups", platform) or line.kind != "collective-permute":
        return line
    return Collective("all-to-all", line.axes, line.count, size * line.bytes)
