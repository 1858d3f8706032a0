"""Attention of some queries to some of their keys: partial results that can be merged, and their gradients.

Letters: B rows, S positions of the queries, T of the keys, G key-value heads, R query heads that share one, K width of
a head; X = R * S, since the query heads of a group are folded into the rows of one matrix product.

Attention is the sum of exp(score) * value over the keys, divided by the sum of exp(score). Both sums can be computed
for one set of keys after another if each partial sum keeps the highest score, by which it is scaled. Forward keeps the
logarithm of the second sum; with it, backward recomputes every weight of the softmax without a sum.

Queries are processed in slices of at most `SLICE` positions, so that the scores of a long row are never all in memory.

Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention",
section 3.1 and appendix B (the gradients).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...collectives import varying_zeros

SLICE = 1024
"""The largest number of query positions with scores in memory at once."""


class Marks(NamedTuple):
    """The positions and segments of queries or keys. A query attends to keys of its segment that are not after it.

    Attributes:
        position_S: The positions, int32, (S,); None if every key is before every query.
        segment_BS: The segments, int32, (B, S); None if a row is one document.
    """

    position_S: Array | None = None
    segment_BS: Array | None = None


class Part(NamedTuple):
    """The undivided softmax over some of the keys; float32 or wider.

    Attributes:
        total_BGRSK: The sum of exp(score - peak) * value over these keys.
        weight_BGRS: The sum of exp(score - peak).
        peak_BGRS: The highest score; the lowest finite number if the query attends to none of these keys.
    """

    total_BGRSK: Array
    weight_BGRS: Array
    peak_BGRS: Array


def attend(query_BGRSK: Array, key_BGTK: Array, value_BGTK: Array, rows: Marks, columns: Marks) -> Part:
    """Returns the part of the softmax over these keys.

    Args:
        query_BGRSK: Queries.
        key_BGTK: Keys.
        value_BGTK: Values.
        rows: Marks of the queries.
        columns: Marks of the keys.

    Returns:
        The part. For a query that attends to none of the keys, it contains arbitrary numbers and a `peak` with which
        `merge` ignores them.
    """

    def one_slice(query_BGRSK: Array, rows: Marks) -> Part:
        score_BGRST = _scores(query_BGRSK, key_BGTK, rows, columns)
        peak_BGRS = jnp.max(score_BGRST, axis=-1)
        weight_BGRST = jnp.exp(score_BGRST - peak_BGRS[..., None])
        total_BGRSK = _product("BGXT,BGTK->BGXK", weight_BGRST.astype(value_BGTK.dtype), value_BGTK)
        return Part(total_BGRSK, jnp.sum(weight_BGRST, axis=-1), peak_BGRS)

    num_slices = _num_slices(query_BGRSK.shape[3])
    if num_slices == 1:
        return one_slice(query_BGRSK, rows)
    sliced = _slice(query_BGRSK, num_slices, 3), _slice_marks(rows, num_slices)
    return jax.tree.map(lambda x: _unslice(x, 3), lax.map(lambda each: one_slice(*each), sliced))


def merge(a: Part, b: Part) -> Part:
    """Merges two parts. A part is ignored for queries that attend to none of its keys."""
    peak = jnp.maximum(a.peak_BGRS, b.peak_BGRS)
    scale_a, scale_b = jnp.exp(a.peak_BGRS - peak), jnp.exp(b.peak_BGRS - peak)
    total = a.total_BGRSK * scale_a[..., None] + b.total_BGRSK * scale_b[..., None]
    return Part(total, a.weight_BGRS * scale_a + b.weight_BGRS * scale_b, peak)


def finish(part: Part) -> tuple[Array, Array]:
    """Returns the softmax over all keys, (B, G, R, S, K), and the logarithm of its divisor, (B, G, R, S), both wide."""
    return part.total_BGRSK / part.weight_BGRS[..., None], part.peak_BGRS + jnp.log(part.weight_BGRS)


class Saved(NamedTuple):
    """The residuals of some queries for backward.

    Attributes:
        query_BGRSK: The queries.
        gradient_BGRSK: The gradient of their outputs, in the dtype of the queries.
        log_weight_BGRS: The logarithm of the softmax' divisor, from `finish`.
        share_BGRS: The sum over K of output * gradient, wide.
    """

    query_BGRSK: Array
    gradient_BGRSK: Array
    log_weight_BGRS: Array
    share_BGRS: Array


def save(split: Callable[[Array], Array], query: Array, gradient: Array, out: Array, log_weight: Array) -> Saved:
    """Returns the residuals of queries, whose outputs have this gradient.

    Args:
        split: Reshapes (B, S, H, K) to (..., B, G, R, S, K).
        query: (B, S, H, K), as the gradient and the output.
        gradient: The gradient of the output.
        out: The output of attention.
        log_weight: The logarithm of the softmax' divisor, (..., B, G, R, S), wide.
    """
    wide = log_weight.dtype
    share = jnp.sum(out.astype(wide) * gradient.astype(wide), axis=-1, keepdims=True)
    return Saved(split(query), split(gradient), log_weight, split(share).squeeze(-1))


def attend_backward(
    saved: Saved, key_BGTK: Array, value_BGTK: Array, rows: Marks, columns: Marks
) -> tuple[Array, Array, Array]:
    """Returns the contribution of these keys to the gradients.

    Args:
        saved: The residuals of the queries.
        key_BGTK: Keys.
        value_BGTK: Values.
        rows: Marks of the queries.
        columns: Marks of the keys.

    Returns:
        Gradients of queries, keys and values in their shapes, float32 or wider.
    """

    def one_slice(saved: Saved, rows: Marks) -> tuple[Array, Array, Array]:
        score_BGRST = _scores(saved.query_BGRSK, key_BGTK, rows, columns)
        weight_BGRST = jnp.exp(score_BGRST - saved.log_weight_BGRS[..., None])
        dtype = saved.query_BGRSK.dtype
        dvalue_BGTK = _transposed(weight_BGRST.astype(dtype), saved.gradient_BGRSK)
        dweight_BGRST = _product("BGXK,BGTK->BGXT", saved.gradient_BGRSK, value_BGTK)
        dscore_BGRST = weight_BGRST * (dweight_BGRST - saved.share_BGRS[..., None])
        dscore_BGRST = (dscore_BGRST * saved.query_BGRSK.shape[-1] ** -0.5).astype(dtype)
        dquery_BGRSK = _product("BGXT,BGTK->BGXK", dscore_BGRST, key_BGTK)
        return dquery_BGRSK, _transposed(dscore_BGRST, saved.query_BGRSK), dvalue_BGTK

    num_slices = _num_slices(saved.query_BGRSK.shape[3])
    if num_slices == 1:
        return one_slice(saved, rows)

    def body(sums: tuple[Array, Array], each: tuple[Saved, Marks]) -> tuple[tuple[Array, Array], Array]:
        dquery, dkey, dvalue = one_slice(*each)
        return (sums[0] + dkey, sums[1] + dvalue), dquery

    wide = saved.share_BGRS.dtype
    zeros = varying_zeros(key_BGTK.shape, wide, key_BGTK), varying_zeros(value_BGTK.shape, wide, value_BGTK)
    sliced = Saved(*(_slice(x, num_slices, 3) for x in saved)), _slice_marks(rows, num_slices)
    (dkey_BGTK, dvalue_BGTK), dquery = lax.scan(body, zeros, sliced)
    return _unslice(dquery, 3), dkey_BGTK, dvalue_BGTK


def _scores(query_BGRSK: Array, key_BGTK: Array, rows: Marks, columns: Marks) -> Array:
    """Returns scaled scores, (B, G, R, S, T), wide; the lowest finite number for masked keys."""
    score_BGRST = _product("BGXK,BGTK->BGXT", query_BGRSK, key_BGTK) * query_BGRSK.shape[-1] ** -0.5
    for row, column, sees in zip(rows, columns, (jnp.greater_equal, jnp.equal), strict=True):
        if row is not None and column is not None:
            visible = sees(row[..., :, None], column[..., None, :])
            visible = visible.reshape(-1, 1, 1, *visible.shape[-2:])
            score_BGRST = jnp.where(visible, score_BGRST, jnp.finfo(score_BGRST.dtype).min)
    return score_BGRST


def _product(subscripts: str, rows_BGRSY: Array, matrix: Array) -> Array:
    """Computes a product with R folded into the rows X, in float32 or wider."""
    B, G, R, S, Y = rows_BGRSY.shape
    wide = jnp.promote_types(rows_BGRSY.dtype, jnp.float32)
    result = jnp.einsum(subscripts, rows_BGRSY.reshape(B, G, R * S, Y), matrix, preferred_element_type=wide)
    return result.reshape(B, G, R, S, -1)


def _transposed(rows_BGRST: Array, rows_BGRSK: Array) -> Array:
    """Sums the outer products of rows over R and S: (B, G, T, K), float32 or wider."""
    wide = jnp.promote_types(rows_BGRSK.dtype, jnp.float32)
    return jnp.einsum("BGRST,BGRSK->BGTK", rows_BGRST, rows_BGRSK, preferred_element_type=wide)


def _num_slices(length: int) -> int:
    """Returns the smallest number of equal slices with at most `SLICE` positions."""
    return next(n for n in range(-(-length // SLICE), length + 1) if length % n == 0)


def _slice(x: Array, num_slices: int, dim: int) -> Array:
    """Cuts a dim into slices on a new dim 0."""
    return jnp.moveaxis(x.reshape(*x.shape[:dim], num_slices, -1, *x.shape[dim + 1 :]), dim, 0)


def _unslice(x: Array, dim: int) -> Array:
    """Reverses `_slice`."""
    joined = jnp.moveaxis(x, 0, dim)
    return joined.reshape(*joined.shape[:dim], -1, *joined.shape[dim + 2 :])


def _slice_marks(marks: Marks, num_slices: int) -> Marks:
    return Marks(*(None if x is None else _slice(x, num_slices, x.ndim - 1) for x in marks))
