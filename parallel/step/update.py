"""The optimizer's part of a step: from averaged gradients to the next parameters; any optax transformation.

    updates, opt_state = optimizer.update(gradients, opt_state, params, value=loss, grad=gradients)

Under DiLoCo, each group along `data` trains its own copy, and a round ends with the outer optimizer:

    own_gradients    in `shard_map`: the gradients of this group's copy, over all axes but `data`
    update           under the same jit: the inner optimizer, mapped over the copies
    end_round        in `shard_map`: `diloco.outer_step`, every H steps

`value` and `grad` are for transformations with extra arguments (`optax.GradientTransformationExtraArgs`): the loss of
the batch before the update, and the same gradients as the first argument. The functions `value_fn` and `grad_fn` would
run the model again, but a step has one forward and one backward pass, so an optimizer that needs them is rejected.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec

from ...layouts.paths import differing_leaves, join, leaves_with_paths
from ...mesh.errors import UserError
from .. import diloco
from ..diloco import AXIS
from ..model import Batch, Params
from ..xla.error_texts import NOT_AN_ARRAY, matches
from .composition import DeviceStep, with_frozen
from .loss_scaling import Carried, accept, is_finite, loss_to_follow
from .manual_axes import over_manual_axes
from .state import StepMetrics, TrainState, with_means

_MISSING = re.compile(r"missing \d+ required keyword-only arguments?: (.*)")


def abstract_optimizer_state(optimizer: optax.GradientTransformation, params: Params) -> Any:
    """Returns the shapes and dtypes of an optimizer's state.

    Args:
        optimizer: An optax transformation.
        params: The shapes and dtypes of the parameters.

    Raises:
        UserError: The state contains something other than arrays; the message has its path.
    """
    try:
        return jax.eval_shape(optimizer.init, params)
    except TypeError as error:
        if not matches(error, NOT_AN_ARRAY):
            raise
        raise UserError(
            f"The optimizer's init returned something other than an array: {str(error).splitlines()[0]}. Its state is "
            "kept on devices and in checkpoints, so it must contain only arrays and numbers. Keep other settings in "
            "the function that makes the optimizer."
        ) from error


def dims_of_blocks(optimizer: optax.GradientTransformation, params: Params, slots: int) -> dict[str, tuple[int, ...]]:
    """Returns the dims of an optimizer's state that count blocks: those that differ for a model with one block less.

    Args:
        optimizer: An optax transformation.
        params: The shapes and dtypes of the parameters, with blocks stacked on dim 0 below "blocks".
        slots: The number of stacked blocks, at least 2.

    Returns:
        Path in the optimizer's state -> its dims, without arrays that count no blocks.
    """

    def shorter(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((leaf.shape[0] - 1, *leaf.shape[1:]), leaf.dtype)

    fewer = {**params, "blocks": jax.tree.map(shorter, params["blocks"])}
    of_fewer = dict(leaves_with_paths(abstract_optimizer_state(optimizer, fewer)))
    found = {}
    for path, leaf in leaves_with_paths(abstract_optimizer_state(optimizer, params)):
        other = of_fewer[path].shape if path in of_fewer else ()
        dims = [dim for dim, size in enumerate(leaf.shape) if size == slots and other[dim : dim + 1] != (size,)]
        if dims:
            found[path] = tuple(dims)
    return found


def apply_optimizer(
    optimizer: optax.GradientTransformation, gradients: Params, opt_state: Any, params: Params, loss: Array
) -> tuple[Params, Any]:
    """Updates parameters once. Traced.

    Args:
        optimizer: An optax transformation.
        gradients: The averaged and clipped gradients.
        opt_state: The optimizer's state.
        params: The parameters that the loss was differentiated by.
        loss: The loss that the gradients belong to, a scalar.

    Returns:
        The next parameters and state.

    Raises:
        UserError: The optimizer needs arguments that a step does not have, branches in Python on traced values, or
            returned something other than updates and a state with the structure of its inputs.
    """
    try:
        result = optax.with_extra_args_support(optimizer).update(
            gradients, opt_state, params, value=loss, grad=gradients
        )
    except jax.errors.ConcretizationTypeError as error:
        raise UserError(
            "The optimizer's update needs the value of an array in Python (`if`, `float(...)`), but a step is compiled "
            "once for all values. Write it with jnp.where or jax.lax.cond, and keep counters as arrays in its state. "
            f"JAX reports: {str(error).splitlines()[0]}"
        ) from error
    except TypeError as error:
        missing = _MISSING.search(str(error))
        if missing is None:
            raise
        raise UserError(
            f"The optimizer's update needs {missing[1]}, which a step does not have: it passes value= (the loss) and "
            "grad= (the gradients), and runs the model once. A line search runs it several times: leave it out, "
            "as in optax.lbfgs(learning_rate, linesearch=None), or use another optimizer."
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(
            f"The optimizer's update must return (updates, state), but it returned a {type(result).__name__}."
        )
    updates, new_state = result
    _check_structure("updates", updates, params, lambda leaf: f"of shape {list(jnp.shape(leaf))}")
    _check_structure("a state", new_state, opt_state, lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}")
    return optax.apply_updates(params, updates), new_state


def _check_structure(what: str, found: Any, wanted: Any, describe: Callable[[Any], str]) -> None:
    """Rejects a tree whose paths, or the descriptions of whose leaves, differ from those of another tree."""
    for path, given, want in differing_leaves(found, wanted, describe):
        raise UserError(
            f"The optimizer's update returned {what} in which {path!r} is {given}, expected {want}. Updates have the "
            "structure and the shapes of the parameters; a state also keeps its dtypes from step to step."
        )


def start_copies(state: TrainState, optimizer: optax.GradientTransformation, groups: int) -> TrainState:
    """Returns the initial state of local steps: every group starts from the shared parameters.

    Args:
        state: A state with global parameters, but without the optimizer's state.
        optimizer: The inner optimizer.
        groups: The size of `data`.
    """
    params = state.params
    copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (groups, *leaf.shape)), params)
    extra = diloco.Copies(copies, jax.tree.map(jnp.zeros_like, params))
    return state._replace(opt_state=jax.vmap(optimizer.init)(copies), extra=extra)


def make_local_step(
    device_step: DeviceStep, optimizer: optax.GradientTransformation, *, abstract: bool
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Builds the step (state, batch) -> (state, metrics) of local steps on global arrays.

    Args:
        device_step: The per-device half, which sums gradients over all axes but `data`.
        optimizer: The inner optimizer; it runs on each group's copy independently of the others.
        abstract: Whether to map over a mesh without devices, for lowering only.
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

    def end_round(params: Params, extra: diloco.Copies, step: Array, finite: Array) -> tuple[Params, diloco.Copies]:
        of_all = params, _own(extra.copies), extra.momentum
        frozen, (params, own, momentum) = zip(*map(plan.split_frozen, of_all), strict=True)
        moved, copies, momentum = map(join, diloco.outer_step(params, own, momentum, step, finite, plan), frozen)
        return moved, diloco.Copies(_stacked(copies), momentum)

    in_specs, out_specs = (copied, plan.batch_spec, whole, whole, whole), (of_trained, PartitionSpec(AXIS), whole)
    differentiate = over_manual_axes(own_gradients, plan, in_specs, out_specs, abstract=abstract)
    extra_specs = diloco.Copies(copied, shared)
    given = shared, extra_specs, whole, whole
    meet = over_manual_axes(end_round, plan, given, (shared, extra_specs), abstract=abstract)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        copies = state.extra.copies
        found, losses, metrics = differentiate(copies, batch, state.key, state.step, state.loss_scale)
        found = with_frozen(found, copies, plan)
        update = jax.vmap(partial(apply_optimizer, optimizer))  # each group's loss is that of its own rows
        before = Carried(copies, state.opt_state)
        losses = loss_to_follow(losses, metrics)  # if one group's update is skipped, those of all groups are
        after = Carried(*update(found, state.opt_state, copies, losses))
        after, loss_scale = accept(after, before, state.loss_scale, metrics, plan.options.precision)
        extra = state.extra._replace(copies=after.params)
        params, extra = meet(state.params, extra, state.step + 1, is_finite(metrics))
        following = state._replace(
            step=state.step + 1,
            params=params,
            opt_state=after.opt_state,
            extra=extra,
            loss_scale=loss_scale,
        )
        return following, with_means(metrics, state.loss_scale)

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
