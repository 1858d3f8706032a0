"""The layout of a parameter without a user rule: each strategy adds its axis to the layout of the previous ones.

Strategies are applied from the fastest network to the slowest: those of the model's own work (tensor, expert), then
FSDP, then the stages of a pipeline. The axis that a step gathers first is therefore the innermost of a dim.
"""

import re
from dataclasses import replace
from functools import partial

from jax import ShapeDtypeStruct

from ...layouts.layout_map import LayoutMap
from ...layouts.paths import in_blocks, leaves_with_paths, some
from ...layouts.sizes import array_bytes, counted, format_bytes
from ...layouts.tensor_layout import TensorLayout
from .. import fsdp
from ..model import BlockModel, Model, Params
from ..plan import MeshPlan, Parameter
from .strategies import STRATEGIES


def default_layout(
    model: Model | BlockModel, plan: MeshPlan, path: str, leaf: ShapeDtypeStruct
) -> tuple[TensorLayout, str]:
    """Combines the layouts of all strategies for one parameter.

    Args:
        model: The model, split; its `rules` determine the dims that it splits.
        plan: The plan of the mesh.
        path: The path of the parameter.
        leaf: Its global shape and dtype.

    Returns:
        The layout and its reasons.
    """
    stacked = plan.num_blocks is not None and in_blocks(path)
    parameter = Parameter(path, leaf.shape, leaf.dtype, stacked, model_axes(model, path))
    layout, reasons = TensorLayout((None,) * len(leaf.shape), plan.mesh), []
    for strategy in reversed(STRATEGIES.values()):
        layout, reason = strategy.layout(parameter, layout, plan)
        reasons += [reason] if reason else []
    return layout, "; ".join(reversed(reasons)) or ("data: whole" if "data" in plan.configs else "whole")


def settle_fsdp(
    model: Model | BlockModel, plan: MeshPlan, params: Params, rules: LayoutMap | None
) -> tuple[MeshPlan, int, tuple[str, ...]]:
    """Removes the floor of fsdp if no parameter reaches it, and finds the parameters that fsdp cannot split.

    Args:
        model: The model, split.
        plan: The plan of the mesh.
        params: The shapes and dtypes of the parameters.
        rules: The user's rules, which take precedence.

    Returns:
        The plan, without the floor if no parameter reaches it; the bytes of parameters that stay whole because fsdp
        does not divide any of their dims; and one line on each of the two, for the layout table.
    """
    floor, size = plan.in_force(fsdp.AXIS, "floor_bytes", None), plan.mesh_size(fsdp.AXIS)
    if floor is None:
        return plan, 0, ()
    free = [(path, leaf) for path, leaf in leaves_with_paths(params) if rules is None or not rules.deciding_keys(path)]
    place, notes = partial(default_layout, model, plan), []
    ruled = any(fsdp.AXIS in layout.used_axes for layout in (rules or {}).values())
    if floor and free and not ruled and not any(fsdp.AXIS in place(*each)[0].used_axes for each in free):
        config = replace(plan.configs[fsdp.AXIS], floor_bytes=0)
        plan = replace(plan, configs={**plan.configs, fsdp.AXIS: config})
        place = partial(default_layout, model, plan)
        reached = f"No parameter that fsdp {size} can split reaches strategy.fsdp.floor_bytes={floor:,}"
        notes.append(f"{reached}: no floor is used.")
    whole = [(path, leaf) for path, leaf in free if fsdp.DIVIDES_NO_DIM in place(path, leaf)[1]]
    sizes = {path: array_bytes(leaf.shape, leaf.dtype) for path, leaf in whole}
    total = sum(sizes.values())
    if sizes:
        names = some(sorted(sizes, key=lambda path: -sizes[path]))
        arrays = f"{counted(len(sizes), 'array')} of {format_bytes(total)}"
        notes.append(f"{arrays} whole on every device, as fsdp {size} divides no dim: {names}")
    return plan, total, tuple(notes)


def model_axes(model: Model | BlockModel, path: str) -> tuple[str | None, ...]:
    """Returns the axes over which a model splits a parameter, one entry per dim; () if it needs the whole parameter."""
    if isinstance(model, BlockModel):
        for pattern, axes in model.rules.items():
            if re.fullmatch(pattern, path):
                return axes
    return ()
