"""Gradients of the loss: summed over microbatches on each device; their global norm."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...layouts.tensor_layout import TensorLayout
from ..blocks.forward import LocalLoss
from ..collectives import Collective, vary
from ..data import scalar_width
from ..model import Batch, Params
from ..model.loss_sums import LossSums
from ..options import scaled
from ..plan import ShardingPlan
from ..sharding.batch_rows import record_batch_axes


def accumulate_gradients(
    local: LocalLoss, plan: ShardingPlan, params: Params, batch: Batch, key: Array, state: Any, scale: Array | None
) -> tuple[Params, LossSums]:
    """Sums the gradients of one device's rows over its microbatches.

    Since the loss is a sum, not a mean, gradients can be added for any weights of the microbatches: the result does not
    depend on their number.

    Args:
        local: The local loss.
        plan: The plan, with the options of the step; microbatches run one after the other.
        params: The per-device parameters, varying over the manual axes.
        batch: The per-device rows; their number is a multiple of the number of microbatches.
        key: The random key of this step, the same on all devices and in all microbatches.
        state: The model's state, or (); every microbatch starts from the state of the previous one.
        scale: The factor of the loss before it is differentiated; None for no factor.

    Returns:
        Gradients in the parameters' dtype and layout, `scale` times those of the loss, and the unscaled sums with the
        next state; all local to the device.
    """
    microbatches, axes = plan.options.accumulate, plan.manual_axes
    kept = local.keep(params)
    params = local.carriers(params)
    differentiate = local.differentiate or partial(_by_autodiff, local)
    if microbatches == 1:
        found, gradients = differentiate(params, kept, batch, key, state, scale)
        sums = jax.tree.map(lambda leaf: vary(leaf, axes), found._replace(state=()))
        return gradients, sums._replace(state=found.state)

    def body(carry: Any, microbatch: Batch) -> tuple[Any, None]:
        sums, before = carry
        found, gradients = differentiate(params, kept, microbatch, key, before, scale)
        new = gradients, found._replace(state=())
        state = jax.tree.map(lambda leaf, old: vary(leaf.astype(old.dtype), axes), found.state, before)
        return (jax.tree.map(lambda a, b: a + b, sums, new), state), None

    state = jax.tree.map(lambda leaf: vary(leaf, axes), state)
    first = {name: rows[: rows.shape[0] // microbatches] for name, rows in batch.items()}
    with record_batch_axes() as requests:
        shapes = jax.eval_shape(lambda batch: local.loss(params, kept, batch, key, state), first)._replace(state=())
    spread = bool(requests or jax.tree.leaves(state))
    pieces = {name: _split(rows, microbatches, spread) for name, rows in batch.items()}
    no_sums = jax.tree.map(lambda leaf: vary(jnp.zeros(leaf.shape, leaf.dtype), axes), shapes)
    start = (jax.tree.map(jnp.zeros_like, params), no_sums), state
    ((gradients, sums), state), _ = lax.scan(body, start, pieces)
    return gradients, sums._replace(state=state)


def _by_autodiff(
    local: LocalLoss, params: Params, kept: Any, batch: Batch, key: Array | None, state: Any, scale: Array | None
) -> tuple[LossSums, Params]:
    """Computes the sums of a loss and its gradients by autodiff; see `LocalLoss.differentiate`."""

    def loss(params: Params) -> tuple[Array, LossSums]:
        sums = local.loss(params, kept, batch, key, state)
        return scaled(sums.total, scale), sums

    (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return sums, gradients


def _split(rows: Array, microbatches: int, spread: bool) -> Array:
    """Splits rows into (microbatches, rows of one, ...): consecutive rows or, if `spread`, every nth row.

    If rows depend on each other, the rows of a microbatch must not depend on the mesh.
    """
    if spread:
        return rows.reshape(rows.shape[0] // microbatches, microbatches, *rows.shape[1:]).swapaxes(0, 1)
    return rows.reshape(microbatches, rows.shape[0] // microbatches, *rows.shape[1:])


def complete_squares(gradients: Params, layouts: Any, axes: tuple[str, ...]) -> list[Array]:
    """Returns the local sum of squares of complete gradients, to reduce with the loss; [] if none is complete."""
    squares = _squares(gradients, layouts, axes).get(axes, []) if axes else []
    return [jnp.asarray(sum(squares))] if squares else []


def global_norm(
    gradients: Params, layouts: Any, axes: tuple[str, ...], complete: Sequence[Array], divisor: Array
) -> Array:
    """Returns the Euclidean norm over all elements of all gradients, each counted once, divided by `divisor`.

    Squares of gradients that are split over some of the axes are summed over all axes in one reduction, to which each
    device contributes its share. Its operands are divided by a result of the first reduction so that it depends on that
    one: XLA would sometimes merge two independent reductions.

    Args:
        gradients: The reduced per-device gradients, in the layouts of their parameters.
        layouts: The parameters' `TensorLayout`s.
        axes: The mesh axes over which devices have shares of the loss.
        complete: The result of `complete_squares`, summed over the axes.
        divisor: A positive number, the weight of the global batch.

    Returns:
        A scalar of at least float32, the same on every device.
    """
    squares = _squares(gradients, layouts, axes)
    totals = [*complete, *squares.get((), [])]
    shares = [
        sum(found) / prod(lax.axis_size(axis) for axis in axes if axis not in split)  # the devices with equal parts
        for split, found in sorted(squares.items())
        if 0 < len(split) < len(axes)
    ]
    if shares:
        totals.append(lax.psum(vary(jnp.asarray(sum(shares)) / divisor, axes), axes) * divisor)
    return jnp.sqrt(jnp.asarray(sum(totals))) / divisor


def _squares(gradients: Params, layouts: Any, axes: tuple[str, ...]) -> dict[tuple[str, ...], list[Array]]:
    """Returns local sums of squares, by the axes that split the gradient."""
    leaves, treedef = jax.tree.flatten(gradients)
    groups: dict[tuple[str, ...], list[Array]] = {}
    for leaf, layout in zip(leaves, treedef.flatten_up_to(layouts), strict=True):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        groups.setdefault(_split_axes(layout, axes), []).append(jnp.sum(wide * wide))
    return groups


def norm_cost(layouts: Sequence[TensorLayout], axes: tuple[str, ...], reduce_dtype: str) -> list[Collective]:
    """Returns one all-reduce of a scalar, if parameters are split over some but not all of the axes."""
    partly = any(0 < len(_split_axes(layout, axes)) < len(axes) for layout in layouts)
    return [Collective("all-reduce", axes, 1, scalar_width(reduce_dtype))] if partly else []


def _split_axes(layout: TensorLayout, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in layout.used_axes)


def clip_factor(norm: Array, clip_norm: float) -> Array:
    """Returns the factor that scales gradients of this global norm to at most `clip_norm` (0 = no clipping)."""
    if clip_norm == 0:
        return jnp.ones_like(norm)
    return jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
