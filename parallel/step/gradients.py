"""Gradients of the loss: summed over microbatches on each device, and measured once over the mesh."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...layouts.tensor_layout import TensorLayout
from ..blocks.forward import LocalLoss
from ..collectives import Collective, vary
from ..data import scalar_width
from ..loss_scaling import scaled
from ..model import Batch, Params
from ..model.loss_sums import LossSums
from ..model.row_axes import noticing


def accumulate_gradients(
    local: LocalLoss,
    params: Params,
    batch: Batch,
    key: Array | None,
    state: Any,
    scale: Array | None = None,
    *,
    microbatches: int,
    axes: tuple[str, ...],
) -> tuple[Params, LossSums]:
    """Sums the gradients of one device's rows over its microbatches.

    Since the loss is a sum, not a mean, gradients add up whatever the weights of the microbatches: one microbatch or
    many give the same.

    Args:
        local: The local loss.
        params: Per-device parameters, varying over the axes.
        batch: Per-device rows; their number is a multiple of `microbatches`.
        key: Randomness of this step, the same on all devices and in all microbatches.
        state: The model's, () where it has none; every microbatch starts from that of the one before.
        scale: What the loss is multiplied by before it is differentiated; None for nothing.
        microbatches: How many pieces the rows are cut into, one after the other in memory.
        axes: Mesh axes over which devices hold shares of the loss.

    Returns:
        Gradients in the parameters' dtype and layout, `scale` times those of the loss; and the sums, which are not
        scaled, and the next state, all local to the device.
    """
    kept = local.keep(params)
    params = local.carriers(params)
    differentiate = local.differentiate or _differentiated(local)
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
    with noticing() as asked:
        shapes = jax.eval_shape(lambda batch: local.loss(params, kept, batch, key, state), first)._replace(state=())
    spread = bool(asked or jax.tree.leaves(state))
    pieces = {name: _split(rows, microbatches, spread) for name, rows in batch.items()}
    no_sums = jax.tree.map(lambda leaf: vary(jnp.zeros(leaf.shape, leaf.dtype), axes), shapes)
    start = (jax.tree.map(jnp.zeros_like, params), no_sums), state
    ((gradients, sums), state), _ = lax.scan(body, start, pieces)
    return gradients, sums._replace(state=state)


def _differentiated(local: LocalLoss) -> Callable[..., tuple[LossSums, Params]]:
    """The sums of a loss and its gradients, by autodiff."""

    def differentiate(params: Params, *rest: Any) -> tuple[LossSums, Params]:
        *rest, scale = rest

        def loss(params: Params) -> tuple[Array, LossSums]:
            sums = local.loss(params, *rest)
            return scaled(sums.total, scale), sums

        (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return sums, gradients

    return differentiate


def _split(rows: Array, microbatches: int, spread: bool) -> Array:
    """Rows as (microbatches, rows of one, ...): blocks of rows or, spread, every nth row.

    Where rows depend on each other, which are together in a microbatch must not depend on the mesh.
    """
    if spread:
        return rows.reshape(rows.shape[0] // microbatches, microbatches, *rows.shape[1:]).swapaxes(0, 1)
    return rows.reshape(microbatches, rows.shape[0] // microbatches, *rows.shape[1:])


def complete_squares(gradients: Params, layouts: Any, axes: tuple[str, ...]) -> list[Array]:
    """The local sum of squares of gradients that are complete, to travel with the loss; empty if none is."""
    squares = _squares(gradients, layouts, axes).get(axes, []) if axes else []
    return [jnp.asarray(sum(squares))] if squares else []


def global_norm(
    gradients: Params, layouts: Any, axes: tuple[str, ...], complete: Sequence[Array], divisor: Array
) -> Array:
    """The Euclidean norm over all elements of all gradients, each element counted once, divided.

    Squares of gradients that are split over some axes, and the same along the others, are summed over all axes, in one
    reduction, each device counting its share. It starts from numbers divided by what the first reduction brought, so
    that it follows that one: two that are independent would sometimes be merged.

    Args:
        gradients: Per-device gradients, reduced, laid out as their parameters.
        layouts: The parameters' `TensorLayout`s.
        axes: Mesh axes over which devices hold shares of the loss.
        complete: `complete_squares`, summed over the axes.
        divisor: A number over 0, the weight of the global batch.

    Returns:
        A scalar of at least float32, the same on every device.
    """
    squares = _squares(gradients, layouts, axes)
    totals = [*complete, *squares.get((), [])]
    shares = [
        sum(found) / _num_copies(split, axes) for split, found in sorted(squares.items()) if 0 < len(split) < len(axes)
    ]
    if shares:
        totals.append(lax.psum(vary(jnp.asarray(sum(shares)) / divisor, axes), axes) * divisor)
    return jnp.sqrt(jnp.asarray(sum(totals))) / divisor


def _num_copies(split: tuple[str, ...], axes: tuple[str, ...]) -> int:
    """How many devices hold the same part of what is split over some of the axes."""
    return prod(lax.axis_size(axis) for axis in axes if axis not in split)


def _squares(gradients: Params, layouts: Any, axes: tuple[str, ...]) -> dict[tuple[str, ...], list[Array]]:
    """Local sums of squares, by the axes that the gradient is split over."""
    leaves, treedef = jax.tree.flatten(gradients)
    groups: dict[tuple[str, ...], list[Array]] = {}
    for leaf, layout in zip(leaves, treedef.flatten_up_to(layouts), strict=True):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        groups.setdefault(_split_axes(layout, axes), []).append(jnp.sum(wide * wide))
    return groups


def norm_cost(layouts: Sequence[TensorLayout], axes: tuple[str, ...], reduce_dtype: str) -> list[Collective]:
    """One all-reduce of a scalar, where parameters are split over some, not all, axes."""
    partly = any(0 < len(_split_axes(layout, axes)) < len(axes) for layout in layouts)
    return [Collective("all-reduce", axes, 1, scalar_width(reduce_dtype))] if partly else []


def _split_axes(layout: TensorLayout, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in layout.used_axes)


def clip_factor(norm: Array, clip_norm: float) -> Array:
    """The factor that brings gradients of this global norm down to `clip_norm`, or 1 below it (0 = never clip)."""
    if clip_norm == 0:
        return jnp.ones_like(norm)
    return jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
