"""The layout of a parameter that no rule of the user places: each strategy adds its axis to what the others chose.

Strategies go from the fastest network to the slowest: what the model splits itself (tensor, expert), FSDP, the
stages of a pipeline. So an axis that a step makes whole first is the innermost of a dim.
"""

import re
from collections.abc import Callable
from typing import TypeAlias

from jax import ShapeDtypeStruct

from ...layouts.paths import in_blocks
from ...layouts.tensor_layout import TensorLayout
from ..model import BlockModel, Model
from ..plan import MeshPlan, Parameter
from .strategies import STRATEGIES

Default: TypeAlias = Callable[[str, ShapeDtypeStruct], tuple[TensorLayout, str]]


def default_layout(model: Model | BlockModel, plan: MeshPlan) -> Default:
    """Composes the layout from those of all strategies.

    Args:
        model: The model, split; its `rules` say which dims it works on part of.
        plan: Which axis does what.

    Returns:
        A function of (path, global shape and dtype) to the layout and the reasons for it.
    """

    def place(path: str, leaf: ShapeDtypeStruct) -> tuple[TensorLayout, str]:
        stacked = plan.num_blocks is not None and in_blocks(path)
        parameter = Parameter(path, leaf.shape, leaf.dtype, stacked, model_axes(model, path))
        layout, reasons = TensorLayout((None,) * len(leaf.shape), plan.mesh), []
        for strategy in reversed(STRATEGIES.values()):
            layout, reason = strategy.layout(parameter, layout, plan)
            reasons += [reason] if reason else []
        return layout, "; ".join(reversed(reasons)) or ("data: whole" if "data" in plan.configs else "whole")

    return place


def model_axes(model: Model | BlockModel, path: str) -> tuple[str | None, ...]:
    """The axes that a model splits a parameter over itself, one entry a dim; () where it needs the whole."""
    if isinstance(model, BlockModel):
        for pattern, axes in model.rules.items():
            if re.fullmatch(pattern, path):
                return axes
    return ()
