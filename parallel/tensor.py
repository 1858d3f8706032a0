"""Tensor parallel: matrix products are split over devices, and so are the positions between them.

Use it inside a host if layers are wide or if there are more devices than rows. Its collectives are on the critical path
of every block, so over a slow network it costs more than any other axis.

Syntax, for the two products of an MLP (or of attention) with rows B, positions L and the axis `tensor` of size T:

    forward    x[B, L, D] = all-gather over tensor of x[B, L_tensor, D]           critical path
               h[B, L, F_tensor] = x[B, L, D] . Wi[D, F_tensor]                   column-parallel, no communication
               y[B, L, D] {U_tensor} = h[B, L, F_tensor] . Wo[F_tensor, D]        row-parallel: partial sums
               y[B, L_tensor, D] = reduce-scatter over tensor of y {U_tensor}     critical path
    backward   the transposes: an all-gather of dy, a reduce-scatter of dx        critical path
               dWi, dWo                                                           local to the shards, complete

1. Between the products, every device keeps its own L / T positions. Norms, dropout and the residual stream are
   therefore computed once instead of T times, and each all-reduce is replaced by its two halves.
2. Query, key and value (or gate and up) share one gather.
3. A head is never divided. Key-value heads are split if T divides their number. Otherwise each device computes the ones
   that its query heads read, from weights that every device holds (`key_value_rule`).
4. The embedding and the head are split over the vocabulary. For the embedding, a device looks up the tokens of its own
   part and uses zeros for the others; the sum is reduce-scattered over positions. For the loss, each device holds
   L x V / T logits. Devices combine the largest logit (which is not differentiated), the sum of exponentials and the
   target's logit. A reduce-scatter combines the last two, so every device gets the losses of its own positions. These
   are shares that add up to the loss.
5. The gradient of a parameter that every device holds whole (a norm) is a partial sum over the device's positions;
   `data.py` sums it once per step.
6. With `collective_matmul`, the gather and the scatter run as T - 1 steps of a bidirectional ring. The product of the
   part that has already arrived hides each step (`xla/collective_matmul.py`).

Bytes per block and microbatch, in the compute dtype: 2 gathers and 2 scatters of B x L x D in forward, and as many in
backward. A ring moves (T - 1) / T of that into and out of a device. The step is compute-bound if F / T > C / W, where C
is a device's FLOP/s and W its network bandwidth in bytes/s, with 2-byte elements. A larger batch does not help, so this
axis needs the fastest links.

XLA can split a model without collectives from its layout rules alone: `tensor: {size: T, explicit: false}`.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3; Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models", section 4.2 (positions); Wang et al. 2023, "Overlap Communication with Dependent Computation
via Decomposition" (collective matmul).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from .collectives import own_collectives
from .options import check_options
from .plan import as_stored, no_problems, split_by_model, splits_nothing, summed_elsewhere, unchanged
from .xla.collective_matmul import ring_gather_products, ring_product_scatter
from .xla.product import product

AXIS = "tensor"


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """Options of the strategy `tensor`."""

    size: int = 1
    """Devices over which every matrix product is split; they need the fastest links; -1 = the rest."""
    explicit: bool = True
    """Models that support it split their own work; false leaves the axis to XLA and your layout rules."""
    collective_matmul: bool = False
    """Run gathers and scatters as the steps of a ring, each overlapping a product."""

    def __post_init__(self) -> None:
        check_options(AXIS, self)


OPTIONS = TensorConfig
SPLITS = ("parameters", "work")
layout = partial(split_by_model, AXIS)
update_layout = splits_nothing
used_layout = as_stored
begin = finish = unchanged
reduce = summed_elsewhere
check = no_problems
cost = partial(own_collectives, AXIS)


def gather_products(config: TensorConfig, x_BlD: Array, weights_Df: Sequence[Array]) -> list[Array]:
    """Computes column-parallel products that share one gather of the positions.

    Args:
        config: The strategy's options; size 1 means plain products.
        x_BlD: The per-device positions, (B, L / T, D).
        weights_Df: This device's columns of each matrix, (D, F / T).

    Returns:
        One (B, L, F / T) for each matrix: all positions, this device's columns.
    """
    if config.size > 1 and config.collective_matmul:
        return ring_gather_products(x_BlD, weights_Df, AXIS, config.size)
    x_BLD = gather_positions(config, x_BlD)
    return [product(x_BLD, weight) for weight in weights_Df]


def product_scatter(config: TensorConfig, h_BLf: Array, weight_fD: Array) -> Array:
    """Computes a row-parallel product, sums it over devices, and scatters the sum along the positions.

    Args:
        config: The strategy's options; size 1 means a plain product.
        h_BLf: This device's columns of all positions, (B, L, F / T).
        weight_fD: This device's rows of the matrix, (F / T, D).

    Returns:
        (B, L / T, D), this device's positions of the sum.
    """
    if config.size > 1 and config.collective_matmul:
        return ring_product_scatter(h_BLf, weight_fD, AXIS, config.size)
    return scatter_positions(config, product(h_BLf, weight_fD))


def gather_positions(config: TensorConfig, x_BlD: Array) -> Array:
    """Gathers all positions from all devices: (B, L / T, D) to (B, L, D)."""
    return x_BlD if config.size == 1 else lax.all_gather(x_BlD, AXIS, axis=1, tiled=True)


def scatter_positions(config: TensorConfig, partial_BLD: Array) -> Array:
    """Sums over devices, and keeps this device's positions: (B, L, D) to (B, L / T, D)."""
    return partial_BLD if config.size == 1 else lax.psum_scatter(partial_BLD, AXIS, scatter_dimension=1, tiled=True)


def embed_tokens(config: TensorConfig, table_vD: Array, tokens_BL: Array) -> Array:
    """Looks tokens up in a table split over the vocabulary.

    Args:
        config: The strategy's options.
        table_vD: This device's rows of the table, (V / T, D).
        tokens_BL: The token ids, (B, L), the same on all devices along the axis.

    Returns:
        This device's positions, (B, L / T, D); NaN for a token outside the vocabulary.
    """
    if config.size == 1:
        return jnp.take(table_vD, tokens_BL, axis=0)
    held = table_vD.shape[0]
    row_BL = tokens_BL - lax.axis_index(AXIS) * held
    inside_BL = (row_BL >= 0) & (row_BL < held)
    known_BL = (tokens_BL >= 0) & (tokens_BL < held * config.size)
    found_BLD = jnp.take(table_vD, jnp.where(inside_BL, row_BL, 0), axis=0)
    missing = jnp.where(known_BL, 0.0, jnp.nan).astype(table_vD.dtype)
    return scatter_positions(config, jnp.where(inside_BL[..., None], found_BLD, missing[..., None]))


def split_cross_entropy(
    config: TensorConfig, logits_BLv: Array, targets_BL: Array, weights_Bl: Array
) -> tuple[Array, Array]:
    """Returns the weighted negative log-likelihood from logits that are split over the vocabulary.

    Args:
        config: The strategy's options, with size > 1.
        logits_BLv: This device's part of the vocabulary, (B, L, V / T), float32 or wider.
        targets_BL: The target ids, (B, L), the same on all devices along the axis.
        weights_Bl: The weights of this device's part of the positions, (B, L / T).

    Returns:
        This device's share, over its part of the positions: (sum of weight * loss in nats, sum of weights).
    """
    held, own = logits_BLv.shape[2], weights_Bl.shape[1]
    index = lax.axis_index(AXIS)
    max_BL = lax.pmax(lax.stop_gradient(jnp.max(logits_BLv, axis=-1)), AXIS)
    class_BLv = lax.broadcasted_iota(targets_BL.dtype, logits_BLv.shape, 2) + index * held
    is_target_BLv = class_BLv == targets_BL[..., None]
    shifted_BLv = logits_BLv - max_BL[..., None]
    sums_2BL = jnp.stack(
        [jnp.sum(jnp.exp(shifted_BLv), axis=-1), jnp.sum(jnp.where(is_target_BLv, shifted_BLv, 0.0), axis=-1)]
    )
    total_Bl, target_Bl = lax.psum_scatter(sums_2BL, AXIS, scatter_dimension=2, tiled=True)
    assert total_Bl.shape[1] == own
    weights_Bl = weights_Bl.astype(logits_BLv.dtype)
    return jnp.sum((jnp.log(total_Bl) - target_Bl) * weights_Bl), jnp.sum(weights_Bl)


KeyValueRule = Literal["split", "one", "per query"]


def key_value_rule(config: TensorConfig, kv_heads: int) -> KeyValueRule:
    """Returns the rule for splitting G key-value heads over T devices.

    `split`, if T divides G: each device has G / T heads. `one`, if G divides T: all query heads of a device read one
    head; every device has the weights of all heads and computes that one. `per query`, otherwise: every device has the
    weights of all heads and computes, for each of its query heads, the head that it reads.
    """
    if kv_heads % config.size == 0:
        return "split"
    return "one" if config.size % kv_heads == 0 else "per query"


def own_key_value_weight(config: TensorConfig, weight_DX: Array, heads: int, kv_heads: int) -> Array:
    """Returns the columns of a key or value matrix that this device computes.

    Args:
        config: The strategy's options.
        weight_DX: The columns of this device, (D, G / T * K), if heads are split, otherwise all, (D, G * K).
        heads: H, the number of query heads in the whole model; a multiple of T.
        kv_heads: G, the number of key-value heads in the whole model.

    Returns:
        (D, g * K) with g = G / T, 1 or H / T, according to `key_value_rule`.
    """
    rule = key_value_rule(config, kv_heads)
    if rule == "split":
        return weight_DX
    own = heads // config.size
    weight_DGK = weight_DX.reshape(weight_DX.shape[0], kv_heads, -1)
    first = lax.axis_index(AXIS) * own
    if rule == "one":
        taken = lax.dynamic_slice_in_dim(weight_DGK, first // (heads // kv_heads), 1, axis=1)
    else:
        taken = jnp.take(weight_DGK, (first + jnp.arange(own)) // (heads // kv_heads), axis=1)
    return taken.reshape(weight_DX.shape[0], -1)
