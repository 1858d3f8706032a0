"""Putting one array into a layout, inside or outside a compiled function."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental.layout import Format
from jax.sharding import Sharding

from ..mesh.errors import UserError
from .tensor_layout import TensorLayout


def distribute_tensor(tensor: Any, layout: TensorLayout | Sharding | Format) -> Any:
    """Lays an array out on a mesh.

    Args:
        tensor: A JAX or NumPy array (global), a number or a nested list of numbers, or an array being traced inside
            `jit`, whose sizes may be symbolic. A ShapeDtypeStruct holds no data and is returned unchanged.
        layout: A TensorLayout with a mesh, a JAX sharding, or a JAX Format (sharding and order in memory).

    Returns:
        The same values in that layout: under `jit` a constraint, outside a copy, or `tensor` itself where it lies
        that way already.

    Raises:
        UserError: If a TensorLayout has no mesh, has more entries than the array has dims, or does not divide it, if
            `layout` is no layout or `tensor` no array, or inside a step, which is a `shard_map` of its own.
    """
    if isinstance(tensor, jax.ShapeDtypeStruct):
        return tensor
    if not isinstance(layout, TensorLayout | Sharding | Format):
        raise UserError(
            f"distribute_tensor got the layout {layout!r} ({type(layout).__name__}); it takes a TensorLayout with a "
            "mesh, a JAX Sharding or a Format. Write TensorLayout(axes, device_mesh)."
        )
    tensor = _as_array(tensor)
    if isinstance(layout, TensorLayout):
        layout.shard_shape(tensor.shape)
        target: Any = layout.backend_layout
    else:
        target = layout
    if isinstance(tensor, Tracer):
        _check_place()
        return jax.lax.with_sharding_constraint(tensor, target)
    if isinstance(tensor, jax.Array) and _lies_so(tensor, target):
        return tensor
    return jax.device_put(tensor, target)


def _as_array(tensor: Any) -> Any:
    """An array as it is; numbers and nested lists of them as one."""
    problem = f"distribute_tensor got a {type(tensor).__name__}"
    if hasattr(tensor, "shape") and hasattr(tensor, "dtype"):
        if getattr(tensor.dtype, "kind", "f") not in "OSU":
            return tensor
        problem += f" of {tensor.dtype}, which is no dtype of JAX"
    if isinstance(tensor, bool | int | float | complex | list | tuple):
        try:
            return jnp.asarray(tensor)
        except (TypeError, ValueError) as error:
            problem += f" that is no array of numbers ({str(error).splitlines()[0]})"
    raise UserError(
        f"{problem}; it lays out one array. Lay out the arrays of a tree with jax.tree.map(distribute_tensor, tree, "
        "layouts)."
    )


def _check_place() -> None:
    """Refuses constraints inside a `shard_map`, where a device has its own part of an array and no global dims."""
    context = jax.sharding.get_abstract_mesh()
    manual = [str(axis) for axis in context.manual_axes if context.shape[axis] > 1]
    if manual:
        raise UserError(
            f"distribute_tensor inside a shard_map over {', '.join(manual)}: there a device has its own rows, "
            "and an array has no layout on the whole mesh. In a model that a step trains, name the activation, "
            'y = spmdkit.name_output(y, "layer/output"), and lay it out by a rule of that name.'
        )


def _lies_so(tensor: Any, target: Sharding | Format) -> bool:
    if isinstance(target, Sharding):
        return tensor.sharding.is_equivalent_to(target, tensor.ndim)
    return tensor.format == target
