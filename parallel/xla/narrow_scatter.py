"""Reduce-scatter of a gradient that is narrower than its sum: an exchange in its own dtype, then a local sum.

A ring passes on sums, so it sends a bfloat16 gradient in float32 if it is to be summed in float32. In an all-to-all,
every device sends each other device its part of the gradient as it is, and sums the parts that it received: half the
bytes, and no digit lost. It pays off between devices in different hosts. If several devices of a group share a host, a
ring crosses the network once for all of them. Inside a host, links are fast, and XLA overlaps a reduce-scatter better.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ...mesh.device_mesh import DeviceMesh
from .platform import DIRECT


def sums_after_exchange(mesh: DeviceMesh, axes: Sequence[str], dtype: Any, sum_dtype: str) -> bool:
    """Returns whether a reduce-scatter is an exchange and a local sum.

    Args:
        mesh: The mesh.
        axes: The axes of the reduce-scatter.
        dtype: The dtype of the gradient.
        sum_dtype: The dtype of the sum.
    """
    is_narrow = jnp.dtype(dtype).itemsize < jnp.dtype(sum_dtype).itemsize
    return is_narrow and mesh.platform in DIRECT and mesh.has_one_per_host(axes)


def exchange_and_sum(value: Array, axes: tuple[str, ...], *, dim: int, dtype: str) -> Array:
    """Reduce-scatters a value along one dim inside `shard_map`, without casting it before it is sent.

    Args:
        value: The per-device value.
        axes: The mesh axes to sum over.
        dim: The dim to scatter.
        dtype: The dtype of the sum.
    """
    received = lax.all_to_all(value, axes, split_axis=dim, concat_axis=dim, tiled=True)
    size = lax.axis_size(axes)
    shape = (*value.shape[:dim], size, value.shape[dim] // size, *value.shape[dim + 1 :])
    return jnp.sum(received.reshape(shape), axis=dim, dtype=dtype)
