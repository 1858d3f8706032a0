"""From a model and its layouts to the loss of one device's rows: gather, run, drop, block by block."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..layouts.tensor_layout import TensorLayout
from .fsdp import attach, gather
from .model import Activations, Batch, BlockModel, Model, Params, fold_block
from .precision import Precision
from .remat import remat_block

Kept: TypeAlias = Any
"""Whole parameters that are gathered once a step."""


class LocalLoss(NamedTuple):
    """The loss over the rows of one device as a function of its shards, to run inside `shard_map`.

    Attributes:
        keep: `keep(params) -> kept`: gathers what stays whole for the whole step; once, before any microbatch.
        loss: `loss(params, kept, batch, key) -> (sum, weight)`: differentiate with respect to `params` alone.
    """

    keep: Callable[[Params], Kept]
    loss: Callable[[Params, Kept, Batch, Array | None], tuple[Array, Array]]


def local_loss(
    model: Model | BlockModel, layouts: Any, batch_axes: tuple[str, ...], *, remat: str, precision: Precision
) -> LocalLoss:
    """Composes a model with the gathering of its parameters.

    Args:
        model: The model; a `BlockModel`'s blocks are gathered one at a time, everything else once a step.
        layouts: Its parameters' `TensorLayout`s, a pytree of their structure.
        batch_axes: Mesh axes over which rows are split.
        remat: What blocks keep for backward, one of `REMAT_POLICIES`.
        precision: The compute and reduce dtypes.
    """

    def gather_all(params: Params) -> Kept:
        return gather(params, layouts, batch_axes, precision)

    def whole_loss(params: Params, kept: Kept, batch: Batch, key: Array | None) -> tuple[Array, Array]:
        assert isinstance(model, Model)
        return _as_scalars(model.loss(attach(params, kept, layouts, batch_axes, precision), batch, key))

    if isinstance(model, Model):
        return LocalLoss(gather_all, whole_loss)
    return _block_loss(model, layouts, batch_axes, remat, precision)


def _block_loss(
    model: BlockModel, layouts: Any, batch_axes: tuple[str, ...], remat: str, precision: Precision
) -> LocalLoss:
    outer_layouts = _without_blocks(layouts)
    block_layouts = jax.tree.map(_without_block_dim, layouts["blocks"])
    gathers = any(axis in batch_axes for layout in jax.tree.leaves(block_layouts) for axis in layout.used_axes)
    makes_copies = gathers or precision.compute != precision.params

    def block(x: Activations, shards: Params, key: Array | None) -> Activations:
        whole = gather(shards, block_layouts, batch_axes, precision)
        return model.block(attach(shards, whole, block_layouts, batch_axes, precision), x, key)

    block = remat_block(block, remat, makes_copies=makes_copies, in_loop=model.scan_unroll < model.num_blocks)

    def keep(params: Params) -> Kept:
        return gather(_without_blocks(params), outer_layouts, batch_axes, precision)

    def loss(params: Params, kept: Kept, batch: Batch, key: Array | None) -> tuple[Array, Array]:
        outer = attach(_without_blocks(params), kept, outer_layouts, batch_axes, precision)

        def body(x: Activations, layer: tuple[Params, Array]) -> tuple[Activations, None]:
            shards, index = layer
            return block(x, shards, fold_block(key, index)), None

        x = model.embed({name: outer[name] for name in model.embed_reads}, batch, key)
        layers = (params["blocks"], jnp.arange(model.num_blocks))
        x, _ = lax.scan(body, x, layers, unroll=model.scan_unroll)
        return _as_scalars(model.head({name: outer[name] for name in model.head_reads}, x, batch, key))

    return LocalLoss(keep, loss)


def _without_blocks(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name != "blocks"}


def _without_block_dim(layout: TensorLayout) -> TensorLayout:
    return TensorLayout(layout.axes[1:], layout.device_mesh)


def _as_scalars(result: Any) -> tuple[Array, Array]:
    """Checks that a loss is a pair of scalars and brings both to at least float32."""
    parts = jax.tree.leaves(result)
    if not isinstance(result, tuple) or len(parts) != 2 or any(jnp.ndim(part) for part in parts):
        given = [jnp.shape(part) for part in parts]
        raise ValueError(
            f"The model's loss returned {type(result).__name__} with shapes {given}. It has to return a pair of "
            "scalars, (sum of the weighted losses, sum of the weights) over the rows it is given: for a mean over n "
            "rows, return (mean * n, n). The runtime divides once, by the weight of the whole global batch."
        )
    loss, weight = (jnp.asarray(part) for part in parts)
    wide = jnp.promote_types(loss.dtype, jnp.float32)
    return loss.astype(wide), weight.astype(wide)
