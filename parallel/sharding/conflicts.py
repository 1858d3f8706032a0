"""Finds all invalid combinations in a plan, so that they are reported together before compilation.

They are layouts that the step cannot use, problems from the `check` of each strategy, and pairs of strategies that do
not combine.
"""

from collections.abc import Iterator

from ...layouts.output_rules import output_rule_problems
from ...layouts.paths import in_blocks
from ...layouts.table import LayoutRow
from .. import pipeline, tensor
from ..model import BlockModel, Model, has_state
from ..plan import ShardingPlan
from .default_layout import model_axes
from .strategies import STRATEGIES


def problems(model: Model | BlockModel, plan: ShardingPlan) -> Iterator[str]:
    """Yields the problems with a plan, one message each.

    Args:
        model: The model, split.
        plan: The plan, of rules and strategies.
    """
    for row in plan.table.rows:
        yield from _layout_problems(model, plan, row)
    if has_state(model) and plan.local_steps:
        yield (
            f"model {plan.model_name!r} has a state (init_state), which would differ between groups that train "
            f"separately: strategy.data.local_steps={plan.local_steps}. Set strategy.data.local_steps to 0."
        )
    for strategy in STRATEGIES.values():
        yield from strategy.check(plan)
    yield from _combination_problems(plan)
    if plan.output_rules is not None:
        yield from output_rule_problems(plan.output_rules, plan.batch_axes, plan.manual_axes)


def _combination_problems(plan: ShardingPlan) -> Iterator[str]:
    """Rejects options of different strategies that do not combine.

    Prefetching does not combine with pipeline stages and with blocks that are kept for the entire step; an embedding
    and head split over stages not with gradients that are scattered within backward.
    """
    prefetches = plan.in_force("fsdp", "prefetch", 0)
    if prefetches and plan.pipeline:
        yield (
            "strategy.fsdp.prefetch=1 does not combine with strategy.pipe, whose stages gather each block where they "
            "run it. Set strategy.fsdp.prefetch to 0; with strategy.fsdp.keep=step each block is gathered only once."
        )
    if prefetches and plan.zero == 2:
        yield (
            "strategy.fsdp.prefetch=1 does not combine with strategy.data.zero=2, which keeps gathered blocks for the "
            "whole step. Set strategy.fsdp.prefetch to 0, or strategy.data.zero to 1."
        )
    outside = [row for row in plan.table.rows if not in_blocks(row.path)]
    if plan.zero == 2 and any(pipeline.AXIS in row.layout.used_axes for row in outside):
        yield (
            "strategy.pipe.embed_and_head=split scatters gradients after backward, strategy.data.zero=2 within it: a "
            "dim would be split in two orders. Set strategy.data.zero to 1, or strategy.pipe.embed_and_head to whole."
        )


def _layout_problems(model: Model | BlockModel, plan: ShardingPlan, row: LayoutRow) -> Iterator[str]:
    """Checks the requirements of the step on the layout of a parameter, from a rule or a strategy."""
    stacked = plan.num_blocks is not None and in_blocks(row.path)
    if stacked and set(row.layout.axes_of_dim(0)) & set(plan.gather_axes):
        yield (
            f"Dim 0 of the leaves under blocks counts the blocks and cannot be split over {plan.gather_axes}: "
            f"{row.path} {row.layout}. Start this rule in `layouts.rules` with null for dim 0."
        )
    yield from _pipe_problems(stacked, plan, row)
    inside = [axis for axis in plan.manual_axes if axis not in (*plan.gather_axes, pipeline.AXIS)]
    wanted = model_axes(model, row.path)
    for dim in range(len(row.shape)):
        needed = tuple(axis for axis in wanted[dim : dim + 1] if axis in inside)
        given = tuple(axis for axis in row.layout.axes_of_dim(dim) if axis in inside)
        if needed != given or (given and row.layout.axes_of_dim(dim)[: len(given)] != given):
            before = f"must be split over {needed[0]}, before all other axes" if needed else ""
            wish = before or f"must not be split over {given[0]}"
            is_tensor = tensor.AXIS in (*needed, *given)
            leave = ", or set strategy.tensor.explicit=false to leave the axis to XLA" if is_tensor else ""
            yield (
                f"{row.path} has the layout {row.layout} by rule {row.rule!r}, but the model splits its own work, so "
                f"dim {dim} {wish}. Correct the rule in layouts.rules{leave}."
            )


def _pipe_problems(stacked: bool, plan: ShardingPlan, row: LayoutRow) -> Iterator[str]:
    """Checks that a pipeline splits dim 0 of all blocks, and nothing else."""
    if plan.pipeline is None or (not stacked and pipeline.splits_embed_and_head(plan)):
        return
    split = [row.layout.axes_of_dim(dim) for dim in range(len(row.shape))]
    over_pipe = [(dim, axes) for dim, axes in enumerate(split) if pipeline.AXIS in axes]
    if over_pipe == ([(0, (pipeline.AXIS,))] if stacked else []):
        return
    rule = "dim 0 of parameters under blocks, and no other dim" if stacked else "nothing outside the blocks"
    remedy = "Start this rule in layouts.rules with pipe" if stacked else "Leave pipe out of this rule in layouts.rules"
    yield f"{row.path} has the layout {row.layout} by rule {row.rule!r}, but strategy.pipe splits {rule}. {remedy}."
