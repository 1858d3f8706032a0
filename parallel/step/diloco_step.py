"""The step under DiLoCo: each group along `data` trains its own copy, and a round ends with the outer optimizer.

own_gradients    in `shard_map`: the gradients of this group's copy, over all axes but `data`
update           under the same jit: the inner optimizer, mapped over the copies
end_round        in `shard_map`: `diloco.outer_step`, every H steps
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec

from ...layouts.paths import join
from .. import diloco
from ..diloco import AXIS
from ..model import Batch, Params
from .composition import DeviceStep, with_frozen
from .loss_scaling import accept
from .manual_axes import over_manual_axes
from .state import StepMetrics, TrainState, with_means
from .update import apply_optimizer


def start(state: TrainState, optimizer: optax.GradientTransformation, groups: int) -> TrainState:
    """Returns the initial state: every group starts from the shared parameters.

    Args:
        state: With global parameters; without the state of the optimizer.
        optimizer: The inner optimizer.
        groups: The size of `data`.
    """
    params = state.params
    copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (groups, *leaf.shape)), params)
    extra = diloco.Copies(copies, jax.tree.map(jnp.zeros_like, params))
    return state._replace(opt_state=jax.vmap(optimizer.init)(copies), extra=extra)


def make_step(
    device_step: DeviceStep, optimizer: optax.GradientTransformation, *, abstract: bool
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Builds the step (state, batch) -> (state, metrics) on global arrays.

    Args:
        device_step: The per-device half, which sums gradients over all axes but `data`.
        optimizer: The inner optimizer; it runs on each group's copy independently of the others.
        abstract: Map over a mesh without devices, for lowering only.
    """
    plan, reduce_dtype = device_step.plan, device_step.plan.options.precision.reduce
    shared, copied, of_trained = (
        plan.manual_specs(table)
        for table in (plan.table, diloco.copies_table(plan.table), diloco.copies_table(plan.trained.table))
    )
    whole = PartitionSpec()

    def own_gradients(
        copies: Params, batch: Batch, key: Array, step: Array, loss_scale: Any
    ) -> tuple[Params, Array, StepMetrics]:
        found, metrics, *_ = device_step.gradients(_own(copies), batch, key, step, (), (), loss_scale)
        return _stacked(found), metrics.loss[None], _shared_metrics(metrics, reduce_dtype)

    def end_round(params: Params, extra: diloco.Copies, step: Array) -> tuple[Params, diloco.Copies]:
        of_all = params, _own(extra.copies), extra.momentum
        frozen, (params, own, momentum) = zip(*map(plan.split_frozen, of_all), strict=True)
        found = diloco.outer_step(params, own, momentum, step, plan)
        moved, copies, momentum = map(join, found, frozen)
        return moved, diloco.Copies(_stacked(copies), momentum)

    in_specs, out_specs = (copied, plan.batch_spec, whole, whole, whole), (of_trained, PartitionSpec(AXIS), whole)
    differentiate = over_manual_axes(own_gradients, plan, in_specs, out_specs, abstract=abstract)
    extra_specs = diloco.Copies(copied, shared)
    meet = over_manual_axes(end_round, plan, (shared, extra_specs, whole), (shared, extra_specs), abstract=abstract)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        copies = state.extra.copies
        found, losses, metrics = differentiate(copies, batch, state.key, state.step, state.loss_scale)
        found = with_frozen(found, copies, plan)
        update = jax.vmap(partial(apply_optimizer, optimizer))  # each group's loss is that of its own rows
        before, precision = (copies, state.opt_state), plan.options.precision
        after = update(found, state.opt_state, copies, losses)
        (copies, opt_state), loss_scale = accept(after, before, state.loss_scale, metrics.grad_norm, precision)
        extra = state.extra._replace(copies=copies)
        params, extra = meet(state.params, extra, state.step + 1)
        metrics = with_means(metrics, state.loss_scale)
        return TrainState(state.step + 1, params, opt_state, state.key, extra, loss_scale=loss_scale), metrics

    return step


def _own(copies: Params) -> Params:
    """Returns this group's copy, inside `shard_map`, where the leading dim has size 1."""
    return jax.tree.map(lambda leaf: leaf[0], copies)


def _stacked(own: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[None], own)


def _shared_metrics(metrics: StepMetrics, reduce_dtype: str) -> StepMetrics:
    """Returns the loss of all rows, the mean of the groups' norms, and the sums of the model's own metrics."""
    wide = jnp.promote_types(reduce_dtype, jnp.float32)
    scalars = metrics._replace(loss=metrics.loss * metrics.weight)
    found = lax.psum(jax.tree.map(lambda scalar: scalar.astype(wide), scalars), AXIS)
    loss = found.loss / jnp.where(found.weight == 0, 1, found.weight)
    return found._replace(loss=loss, grad_norm=found.grad_norm / lax.axis_size(AXIS))
