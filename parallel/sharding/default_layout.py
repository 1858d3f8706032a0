"""The layout of a parameter that no rule of the user places: each strategy adds its axis to what the others chose."""

import re
from collections.abc import Callable
from typing import TypeAlias

from jax import ShapeDtypeStruct

from ...layouts.problems import LayoutError
from ...layouts.split_dim import split_further
from ...layouts.table import LayoutRow
from ...layouts.tensor_layout import TensorLayout
from ...mesh.device_mesh import DeviceMesh
from .. import data, fsdp, pipeline, tensor
from ..model import BlockModel, Model
from ..plan import Layouts
from .strategies import StrategyConfigs

Default: TypeAlias = Callable[[str, ShapeDtypeStruct], tuple[TensorLayout, str]]


def default_layout(model: Model | BlockModel, mesh: DeviceMesh, configs: StrategyConfigs, indivisible: str) -> Default:
    """Composes the layout: what the model splits itself (tensor, expert), the stages of a pipeline, then FSDP.

    Args:
        model: The model, split; its `rules` say which dims it works on part of.
        mesh: The mesh.
        configs: Options of the strategies.
        indivisible: What FSDP does with a parameter that it cannot split, as `layouts.indivisible`.

    Returns:
        A function of (path, global shape and dtype) to the layout and the reasons for it.
    """
    shards = configs.get(fsdp.AXIS)

    def place(path: str, leaf: ShapeDtypeStruct) -> tuple[TensorLayout, str]:
        stacked = isinstance(model, BlockModel) and path.split("/")[0] == "blocks"
        axes = model_axes(model, path) or (None,) * len(leaf.shape)
        if stacked and pipeline.AXIS in configs and mesh.axis_size(pipeline.AXIS) > 1:
            axes = (pipeline.AXIS, *axes[1:])
        layout = TensorLayout(axes, mesh)
        reasons = [f"{axis}: dim {dim}" for dim in range(len(leaf.shape)) for axis in layout.axes_of_dim(dim)]
        if shards is not None and mesh.axis_size(fsdp.AXIS) > 1:
            layout, reason = fsdp.layout(shards, leaf, layout, mesh, stacked=stacked, indivisible=indivisible)
            reasons.append(reason)
        if not stacked and splits_outer(configs):
            found = split_further(layout, leaf.shape, mesh, pipeline.AXIS, first=0)
            layout = found[0] if found else layout
            reasons += [f"pipe: dim {found[1]}"] if found else []
        return layout, "; ".join(reasons) or ("data: whole" if data.AXIS in configs else "whole")

    return place


def splits_outer(configs: StrategyConfigs) -> bool:
    """Whether what is outside the blocks is split over the stages of a pipeline."""
    config = configs.get(pipeline.AXIS)
    return config is not None and config.size > 1 and config.embed_and_head == "split"


def model_axes(model: Model | BlockModel, path: str) -> tuple[str | None, ...]:
    """The axes that a model splits a parameter over itself, one entry a dim; () where it needs the whole."""
    if isinstance(model, BlockModel):
        for pattern, axes in model.rules.items():
            if re.fullmatch(pattern, path):
                return axes
    return ()


def check_layouts(model: Model | BlockModel, layouts: Layouts) -> None:
    """Checks what the step relies on, whoever placed the parameters.

    Raises:
        LayoutError: All parameters under blocks whose dim 0 is split over the rows' axes, or that are not split as the
            model splits its work.
    """
    problems = [problem for row in layouts.table.rows for problem in _problems(model, layouts, row)]
    if problems:
        raise LayoutError(problems)


def _problems(model: Model | BlockModel, layouts: Layouts, row: LayoutRow) -> list[str]:
    problems = []
    stacked = isinstance(model, BlockModel) and row.path.split("/")[0] == "blocks"
    if stacked and set(row.layout.axes_of_dim(0)) & set(layouts.gather_axes):
        problems.append(
            f"Dim 0 of the leaves under blocks counts the blocks and cannot be split over {layouts.gather_axes}: "
            f"{row.path} {row.layout}. Start this rule in `layouts.rules` with null for dim 0."
        )
    problems += _pipe_problems(stacked, layouts, row)
    inside = [axis for axis in layouts.manual_axes if axis not in (*layouts.gather_axes, pipeline.AXIS)]
    wanted = model_axes(model, row.path)
    for dim in range(len(row.shape)):
        needed = tuple(axis for axis in wanted[dim : dim + 1] if axis in inside)
        given = tuple(axis for axis in row.layout.axes_of_dim(dim) if axis in inside)
        if needed != given or (given and row.layout.axes_of_dim(dim)[: len(given)] != given):
            wish = (
                f"has to be split over {needed[0]}, before all others"
                if needed
                else f"must not be split over {given[0]}"
            )
            is_tensor = tensor.AXIS in (*needed, *given)
            leave = ", or set strategy.tensor.explicit=false to leave the axis to XLA" if is_tensor else ""
            problems.append(
                f"{row.path} has the layout {row.layout} by rule {row.rule!r}, but the model splits its own work, and "
                f"there dim {dim} {wish}. Correct the rule in layouts.rules{leave}."
            )
    return problems


def _pipe_problems(stacked: bool, layouts: Layouts, row: LayoutRow) -> list[str]:
    """A pipeline splits dim 0 of all blocks, and nothing else."""
    if layouts.pipeline is None or (not stacked and splits_outer(layouts.configs)):
        return []
    split = [row.layout.axes_of_dim(dim) for dim in range(len(row.shape))]
    over_pipe = [(dim, axes) for dim, axes in enumerate(split) if pipeline.AXIS in axes]
    if over_pipe == ([(0, (pipeline.AXIS,))] if stacked else []):
        return []
    rule = "dim 0 of what is under blocks, and no other dim" if stacked else "nothing outside the blocks"
    remedy = "Start this rule in layouts.rules with pipe" if stacked else "Leave pipe out of this rule in layouts.rules"
    return [f"{row.path} has the layout {row.layout} by rule {row.rule!r}, but strategy.pipe splits {rule}. {remedy}."]
