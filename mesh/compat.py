"""Everything that depends on the version of JAX, or on a name JAX does not export."""

from typing import Any, TypeAlias

import jax
from jax._src import xla_bridge
from jax.sharding import AbstractMesh, AxisType

Device: TypeAlias = Any
"""A `jax.Device`, which JAX does not export as a type."""

PyTreeDef: TypeAlias = Any
"""A `jax.tree_util.PyTreeDef`, which JAX does not export as a type."""


def backend_started() -> bool:
    """Tells whether JAX has opened its devices already, without opening them.

    Returns:
        True once any backend is initialised; device counts can no longer change then.
    """
    return bool(xla_bridge.backends_are_initialized())


def make_abstract_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> AbstractMesh:
    """Builds a mesh without devices whose axes are all Auto.

    Args:
        shape: One size per axis.
        axis_names: One name per axis.

    Returns:
        The abstract mesh; enough to lower and type a program.
    """
    return AbstractMesh(shape, axis_names, axis_types=(AxisType.Auto,) * len(axis_names))


def varying_axes(value: Any) -> frozenset[str]:
    """The mesh axes over which a value inside `shard_map` is typed as different on each device."""
    aval = jax.typeof(value)
    return frozenset(aval.vma if hasattr(aval, "vma") else aval.mat.varying)
