"""Matrix products that overlap the gather before them, or the scatter after them, with a bidirectional ring.

A device first multiplies its own part while its neighbors' parts arrive, one from each side. After T // 2 steps it has
multiplied all T parts. The permutes of a step run at the same time as its products. They move as many bytes as the
replaced collective, half of them in each direction of the links.

Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", section 5.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from .ring_hop import hop


def ring_gather_products(x_BlD: Array, weights_Df: Sequence[Array], axis: str, size: int) -> list[Array]:
    """Returns the products of all devices' positions with this device's columns.

    Args:
        x_BlD: The per-device positions, (B, l, D).
        weights_Df: The per-device columns of the matrices, (D, f) each.
        axis: The mesh axis of the ring.
        size: T, the size of the axis.

    Returns:
        One (B, T * l, f) for each matrix, positions in the order of the axis.
    """
    index, length = lax.axis_index(axis), x_BlD.shape[1]
    outputs = [jnp.zeros((x_BlD.shape[0], size * length, w.shape[1]), x_BlD.dtype) for w in weights_Df]

    def place(outputs: list[Array], part_BlD: Array, owner: Array) -> list[Array]:
        starts = owner % size * length
        return [
            lax.dynamic_update_slice_in_dim(output, part_BlD @ weight, starts, axis=1)
            for output, weight in zip(outputs, weights_Df, strict=True)
        ]

    upward = downward = x_BlD
    outputs = place(outputs, x_BlD, index)
    for step in range(1, size // 2 + 1):
        upward = hop(upward, axis, size, 1)
        outputs = place(outputs, upward, index - step)
        if 2 * step < size:
            downward = hop(downward, axis, size, -1)
            outputs = place(outputs, downward, index + step)
    return outputs


def ring_product_scatter(h_BLf: Array, weight_fD: Array, axis: str, size: int) -> Array:
    """Returns this device's positions of a product summed over the devices of a ring.

    Two sums travel towards each device, one from each side; every device on the way adds its part of the product.

    Args:
        h_BLf: The per-device columns of all positions, (B, L, f).
        weight_fD: The per-device rows of the matrix, (f, D).
        axis: The mesh axis of the ring.
        size: T, the size of the axis; it must divide L.

    Returns:
        (B, L / T, D).
    """
    index, length = lax.axis_index(axis), h_BLf.shape[1] // size

    def product(owner: Array) -> Array:
        return lax.dynamic_slice_in_dim(h_BLf, owner % size * length, length, axis=1) @ weight_fD

    result = product(index)
    for direction, steps in ((1, size // 2), (-1, (size - 1) // 2)):
        if not steps:
            continue
        traveling = product(index + direction * steps)
        for left in range(steps - 1, 0, -1):
            traveling = hop(traveling, axis, size, direction) + product(index + direction * left)
        result = result + hop(traveling, axis, size, direction)
    return result
