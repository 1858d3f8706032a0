"""One block on whole parameters: gather them, run it, drop them; backward gathers again and reduce-scatters."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from ...layouts.paths import join
from ...layouts.tensor_layout import TensorLayout
from ..fsdp import attach, gather
from ..model import Activations, BlockModel, Params
from ..plan import ShardingPlan
from ..precision import Precision
from ..xla.in_order import apart


def gathered_block(
    model: BlockModel, plan: ShardingPlan, precision: Precision
) -> Callable[[Activations, Params, Params | None, Array | None], Activations]:
    """Returns `block(x, shards, kept, key) -> x`, for the inside of `shard_map`.

    It gathers one block's per-device parameters, unless the plan keeps them whole for the step. The gradient of
    `shards` is reduce-scattered to where the plan wants it.

        shards: The parameters that train; None in place of the others.
        kept: All parameters, whole, if the plan keeps them; if not, the shards of those that do not train, or None.

    Args:
        model: The model, split over the axes inside it.
        plan: Where its parameters and gradients live.
        precision: The compute and reduce dtypes.
    """
    stored, reduced = block_layouts(plan)
    axes, gathers_beside_loops = plan.gather_axes, plan.gathers_blocks and plan.loops_in_blocks
    keeps_blocks = plan.keeps_blocks

    def block(x: Activations, shards: Params, kept: Params | None, key: Array | None) -> Activations:
        shards_of_all = shards if kept is None else join(shards, kept)
        whole = kept if keeps_blocks else gather(shards_of_all, stored, axes, precision)
        params = attach(shards, whole, reduced, axes, precision)
        if gathers_beside_loops:
            params, x = apart(params, x)
        return model.block(params, x, key)

    return block


def block_layouts(plan: ShardingPlan) -> tuple[Any, Any]:
    """The layouts of one block's parameters and of its gradients."""
    tables = plan.used_table.layouts, plan.gradient_table.layouts
    stored, reduced = (jax.tree.map(without_block_dim, tree["blocks"]) for tree in tables)
    return stored, reduced


def without_block_dim(layout: TensorLayout) -> TensorLayout:
    """Drops the block dim."""
    return TensorLayout(layout.axes[1:], layout.device_mesh)
