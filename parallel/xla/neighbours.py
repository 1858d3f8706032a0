"""Sending to the next device of a ring: one hop of ring attention, of a product that hides its gather or scatter.

    everywhere               collective-permute: each device to its neighbour
    simulated devices,       all-to-all in the ring's own group, zeros to all but the neighbour: N times the bytes
    beside a pipeline        (the trick `hop_in_groups` of `platform.py`)

XLA:CPU's collective-permute waits for every device of the mesh, those of other stages too, which are at other work or
have no turn at all. So there, and only there, a hop has another transport. What is sent, in which order it is summed
and how often is the same program; the numbers are the same bits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..collectives import Collective
from .platform import TRICKS, by_platform

PIPE = "pipe"


def hop(x: Array, axis: str, size: int, direction: int = 1, *, in_groups: bool = False) -> Array:
    """Gives an array to the next device of a ring and takes that of the one before. Inside `shard_map`.

    Args:
        x: Per-device, any shape and number type.
        axis: The mesh axis of the ring.
        size: N, its size.
        direction: 1 towards higher indices, -1 towards lower.
        in_groups: Whether to send in groups on every platform, which `strategy.context.send=groups` asks for.

    Returns:
        What the neighbour gave; its gradient travels the other way, alike.
    """
    if in_groups:
        return in_group(x, axis, size, direction)
    return _hop(x, axis, size, direction) if _beside_pipe() else in_pairs(x, axis, size, direction)


def in_pairs(x: Array, axis: str, size: int, direction: int) -> Array:
    """A hop by collective-permute."""
    return lax.ppermute(x, axis, [(source, (source + direction) % size) for source in range(size)])


def in_group(x: Array, axis: str, size: int, direction: int) -> Array:
    """A hop by all-to-all; devices of other groups need not take part."""
    rank = lax.axis_index(axis)
    for_each = (jnp.arange(size) == (rank + direction) % size).astype(x.dtype)
    from_each = lax.all_to_all(jnp.multiply.outer(for_each, x), axis, split_axis=0, concat_axis=0)
    return lax.dynamic_index_in_dim(from_each, (rank - direction) % size, 0, keepdims=False)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _hop(x: Array, axis: str, size: int, direction: int) -> Array:
    ways: Any = {"axis": axis, "size": size, "direction": direction}
    return by_platform("hop_in_groups", partial(in_group, **ways), partial(in_pairs, **ways), x)


def _hop_forward(x: Array, axis: str, size: int, direction: int) -> tuple[Array, None]:
    return _hop(x, axis, size, direction), None


def _hop_backward(axis: str, size: int, direction: int, _: None, gradient: Array) -> tuple[Array]:
    return (_hop(gradient, axis, size, -direction),)


_hop.defvjp(_hop_forward, _hop_backward)


def _beside_pipe() -> bool:
    """Whether this runs on one stage of several."""
    try:
        return lax.axis_size(PIPE) > 1
    except NameError:  # the mesh has no such axis, or nothing is split over it
        return False


def as_sent(line: Collective, size: int, platform: str) -> Collective:
    """What a hop beside a pipeline really is, of what a model says that it moves.

    Args:
        line: A model's own; only collective-permutes change.
        size: N, devices of its group.
        platform: Where the step runs.
    """
    if platform not in TRICKS["hop_in_groups"].platforms or line.kind != "collective-permute":
        return line
    return Collective("all-to-all", line.axes, line.count, size * line.bytes)
