"""Putting one array into a layout, inside or outside a compiled function."""

from typing import Any

import jax
from jax.core import Tracer
from jax.experimental.layout import Format
from jax.sharding import Sharding

from .tensor_layout import TensorLayout


def distribute_tensor(tensor: Any, layout: TensorLayout | Sharding | Format) -> Any:
    """Lays an array out on a mesh.

    Args:
        tensor: A JAX or NumPy array (global), or an array being traced inside `jit`. A ShapeDtypeStruct holds no
            data and is returned unchanged.
        layout: A TensorLayout with a mesh, a JAX sharding, or a JAX Format (sharding and order in memory).

    Returns:
        The same values in that layout: under `jit` a constraint, outside a copy, or `tensor` itself where it lies
        that way already.

    Raises:
        UserError: If a TensorLayout has no mesh, has more entries than the array has dims, or does not divide it.
    """
    if isinstance(tensor, jax.ShapeDtypeStruct):
        return tensor
    if isinstance(layout, TensorLayout):
        layout.shard_shape(tensor.shape)
        target: Any = layout.backend_layout
    else:
        target = layout
    if isinstance(tensor, Tracer):
        return jax.lax.with_sharding_constraint(tensor, target)
    if isinstance(tensor, jax.Array) and _lies_so(tensor, target):
        return tensor
    return jax.device_put(tensor, target)


def _lies_so(tensor: Any, target: Sharding | Format) -> bool:
    if isinstance(target, Sharding):
        return tensor.sharding.is_equivalent_to(target, tensor.ndim)
    return tensor.format == target
