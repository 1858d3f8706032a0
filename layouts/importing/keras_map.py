"""Keras's own LayoutMap and DeviceMesh (`keras.distribution`), as ours."""

from typing import Any, cast

from ...mesh.device_mesh import DeviceMesh
from ...mesh.errors import UserError
from ..layout_map import LayoutMap, MatchMode
from ..tensor_layout import TensorLayout
from .exact import Entries, Renaming, entries_of, in_mesh


def from_keras(
    layout_map: Any, mesh: DeviceMesh | None = None, *, axes: Renaming | None = None, match: MatchMode = "fullmatch"
) -> LayoutMap:
    """Makes our map of Keras's: the same keys in the same order, on the same mesh or on another one.

    Look-up follows the rules of Keras from 3.14 on: the key that is the path itself, else the one key that matches the
    whole path. Keys of Keras begin with the name of the model ("sequential/dense/kernel"), or with ".*".

    Args:
        layout_map: A `keras.distribution.LayoutMap`, or anything with `items()` of keys and layouts that have `axes`,
            and with a `device_mesh`.
        mesh: The mesh of the map; None makes one of the shape, the axes and the devices of Keras's.
        axes: What mesh axes of Keras's are called in `mesh`, such as {"model": "tensor"}; None for an axis that there
            is not.
        match: How keys meet paths: "search" for rules written for Keras before 3.14.

    Returns:
        The map.

    Raises:
        UserError: This is no such map; a key is no regular expression; an axis is none of the mesh.
    """
    items: Any = getattr(layout_map, "items", None)
    if not callable(items):
        raise UserError(
            f"from_keras got {layout_map!r} ({type(layout_map).__name__}); it takes a keras.distribution.LayoutMap."
        )
    given = {key: _entries_of(key, layout) for key, layout in cast(Any, items)()}
    rules = LayoutMap(_mesh_of(layout_map) if mesh is None else mesh, match)
    for key, entries in in_mesh(given, rules.device_mesh, axes, "from_keras").items():
        rules[key] = TensorLayout(entries)
    return rules


def _entries_of(key: str, layout: Any) -> Entries:
    given = layout if isinstance(layout, tuple) else getattr(layout, "axes", None)
    return entries_of(given, f"from_keras: rule {key!r}")


def _mesh_of(layout_map: Any) -> DeviceMesh:
    """Keras's mesh, of the same devices in the same places."""
    mesh = getattr(layout_map, "device_mesh", None)
    if isinstance(mesh, DeviceMesh):
        return mesh
    parts: Any = [getattr(mesh, name, None) for name in ("shape", "axis_names", "devices")]
    if any(part is None for part in parts):
        raise UserError(
            f"from_keras: the device_mesh of the map is {mesh!r}, which has no shape, axis_names and devices. Give the "
            "mesh: from_keras(layout_map, mesh)."
        )
    shape, names, devices = parts
    return DeviceMesh(tuple(shape), tuple(names), devices)
