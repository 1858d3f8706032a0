"""Gathers a block's parameters, runs the block and drops them; backward gathers again and reduce-scatters gradients.

A policy selects the values that a block keeps from forward to backward: `none` keeps every result of arithmetic, `dots`
the matrix products, `selective` the products that do not widen their input, `local` the block's input and what gathers
and reduce-scatters within the block return (those of `tensor`), `full` only the block's input. Under FSDP, no policy
keeps gathered parameters: backward gathers them again.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models" (selective recomputation); the policies are those of
`jax.checkpoint`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from ...layouts.paths import join
from ...layouts.tensor_layout import TensorLayout
from ...mesh.errors import UserError
from ..data import reduces_in_backward, sum_in_backward
from ..fsdp import attach, gather
from ..model import Activations, BlockModel, Params
from ..plan import ShardingPlan
from ..sharding.strategies import axes_that_split
from ..xla.ordered_collectives import delay_recompute, order_block
from ..xla.primitives import FUSED_ATTENTION, GATHERS, JOINS, MOVES, PLATFORM_CHOICE, SCATTERS, gathered_over


def gathered_block(
    model: BlockModel, plan: ShardingPlan
) -> Callable[[Activations, Params, Params | None, Array | None], Activations]:
    """Returns `block(x, shards, kept, key) -> x`, to run inside `shard_map`.

    It gathers one block's per-device parameters, unless the plan keeps them whole for the step. The gradient of
    `shards` is reduce-scattered to the layout in the plan.

        shards: The trained parameters; None in place of the frozen ones.
        kept: All parameters, whole, if the plan keeps them; otherwise the shards of the frozen ones, or None. If
            gradients stay whole (`shards` are `fsdp.whole_carriers`), the shards of all.

    Args:
        model: The model, split over the axes inside it.
        plan: The plan, with the options of the step.
    """
    stored, reduced = block_layouts(plan)
    axes, precision = plan.gather_axes, plan.options.precision
    trained = block_layouts(plan.trained)[1]
    orders_loops = plan.gathers_blocks and plan.mesh_size("context") > 2  # a ring loops over collectives in a block

    def block(x: Activations, shards: Params, kept: Params | None, key: Array | None) -> Activations:
        if reduces_in_backward(plan):
            shards = sum_in_backward(shards, trained, plan.summed_axes, precision.reduce)
        shards_of_all = shards if kept is None else join(kept, shards)
        whole = kept if plan.keeps_blocks else gather(shards_of_all, stored, axes, precision)
        params = attach(shards, whole, reduced, axes, precision)
        if orders_loops:
            params, x = order_block(params, x)
        return model.block(params, x, key)

    return block


def block_layouts(plan: ShardingPlan) -> tuple[Any, Any]:
    """Returns the layouts of one block's parameters and of its gradients."""

    def of_block(layouts: Any) -> Any:
        return jax.tree.map(lambda layout: TensorLayout(layout.axes[1:], layout.device_mesh), layouts["blocks"])

    return of_block(plan.used_table.layouts), of_block(plan.gradient_table.layouts)


def remat_block(block: Callable[..., Any], remat: str, *, makes_copies: bool, in_loop: bool) -> Callable[..., Any]:
    """Wraps a block so that backward recomputes what the policy does not keep.

    Args:
        block: The function of one block, including its gathers.
        remat: One of `REMAT_POLICIES`.
        makes_copies: Whether the block gathers or casts its parameters, so that backward would keep the copies of all
            blocks; if not, `none` returns the block unchanged.
        in_loop: Whether forward and backward are separate loops of several turns, so that XLA cannot merge the two
            computations; if not, the recomputation waits for the gradient.

    Raises:
        UserError: The policy is unknown.
    """
    if remat not in REMAT_POLICIES:
        raise UserError(f"train.remat={remat!r} is not a valid policy. Choose one of {', '.join(REMAT_POLICIES)}.")
    if remat == "none" and not makes_copies:
        return block
    again = jax.checkpoint(block, policy=REMAT_POLICIES[remat], prevent_cse=not in_loop)
    return again if in_loop else delay_recompute(again, inputs_only=remat == "none")


def save_products(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: saves products of activations and a matrix, and the results of cuDNN's attention."""
    is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *avals, **params)
    return is_product or primitive.name == FUSED_ATTENTION


def save_narrowing_products(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: `save_products` without those that widen, `x @ W` with more columns than rows in W.

    Of a transformer's, these are the first ones of the MLP: two thirds of what `dots` keeps of Llama-3 8B.
    """
    widens = primitive.name == "dot_general" and avals[1].ndim == 2 and avals[1].shape[1] > avals[1].shape[0]
    return save_products(primitive, *avals, **params) and not widens


def save_received(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: saves what gathers and reduce-scatters over the axes inside a model return."""
    return primitive.name in GATHERS | SCATTERS and not gathered_over(params).isdisjoint(axes_that_split("work"))


def save_arithmetic(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy that saves results of arithmetic, and recomputes gathers, moves and casts.

    It also saves a value with a name (`checkpoint_name`): a model names what it casts to a narrower dtype, so that the
    wider value is not saved.
    """
    return primitive.name == "name" or not _only_moves(primitive.name, params)


def _only_moves(name: str, params: Any) -> bool:
    """Returns whether an operation only moves values; for a call (a custom gradient), whether all of it does.

    Moving or casting a value costs little, and saving it would keep a gathered parameter alive under another shape.
    """
    called = params.get("call_jaxpr")
    if called is not None:
        names = [equation.primitive.name for equation in called.eqns]
        chooses = PLATFORM_CHOICE in names  # a value that waits, see ordered_collectives.py
        return chooses or all(_only_moves(equation.primitive.name, equation.params) for equation in called.eqns)
    if name in GATHERS:  # over the axes inside a model, activations are gathered: as expensive as arithmetic
        return gathered_over(params).isdisjoint(axes_that_split("work"))
    return name in MOVES | JOINS


REMAT_POLICIES = {
    "none": save_arithmetic,
    "dots": save_products,
    "selective": save_narrowing_products,
    "local": save_received,
    "full": jax.checkpoint_policies.nothing_saveable,
}
