"""T5X's logical axes: Flax's rules, over a tree of names that the model keeps beside its parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

from ...mesh.device_mesh import DeviceMesh
from ..layout_map import LayoutMap
from .exact import Renaming
from .flax_rules import by_logical_axes, names_by_path

SUFFIX = "_axes"
"""The collection `params_axes` keeps the names of `kernel` as `kernel_axes`."""


def from_t5x_rules(
    rules: Iterable[tuple[str, Any]] | Mapping[str, Any],
    params_axes: Any,
    mesh: DeviceMesh,
    *,
    axes: Renaming | None = None,
) -> LayoutMap:
    """Lays parameters out by T5X's `logical_axis_rules`.

    Args:
        rules: Pairs (logical axis, mesh axis), as `t5x.partitioning.standard_logical_axis_rules` gives them; they mean
            what they mean in `from_flax_rules`.
        params_axes: The collection `params_axes` of the model's variables: at `.../kernel_axes`, an object that has the
            `names` of the dims of `.../kernel`, or these names as a tuple.
        mesh: The mesh of the map.
        axes: What mesh axes of the rules are called here, such as {"model": "tensor"}; None for an axis that there is
            not.

    Returns:
        One rule for each parameter that has names, at the path of the parameter.

    Raises:
        UserError: As `from_flax_rules`.
    """
    what = "from_t5x_rules"
    named = {path.removesuffix(SUFFIX): names for path, names in names_by_path(params_axes, what).items()}
    return by_logical_axes(rules, named, mesh, axes, what)
