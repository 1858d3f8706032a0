"""Parts of ring attention by cuDNN's fused attention, with the functions of `online_softmax.py`; same letters.

cuDNN returns the softmax over the keys it was given and the logarithm of its divisor, which are a part. Its backward
pass takes the output and the logarithm as arguments. With those over all keys, it returns the contribution of some.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ....mesh.compat import cudnn_attention_and_logarithm, cudnn_attention_gradients
from ....mesh.errors import UserError
from .online_softmax import Marks, Part


def is_supported(required: bool, query: Array, key: Array, value: Array, segment: Array | None = None) -> bool:
    """Returns True if cuDNN's causal attention supports these arrays, forward and backward.

    Args:
        required: Raises an error instead of returning False.
        query: (B, L, H, K); only its shape and dtype are used, as of the others.
        key: (B, L, G, K).
        value: (B, L, G, K).
        segment: The segments, int32 (B, L), if attention stays within them.

    Raises:
        UserError: It does not support them, and is required.
    """
    marks = Marks(None, segment)
    options = {"mask": _mask(marks, marks), "is_causal": True, "implementation": "cudnn"}
    attention = partial(jax.nn.dot_product_attention, **options)
    try:
        jax.eval_shape(lambda *arrays: jax.vjp(attention, *arrays)[0], query, key, value)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if required:
            raise UserError(
                f"model.attention=cudnn: cuDNN does not support queries {query.shape} in {query.dtype}: "
                f"{error} Set model.attention=auto, or precision.compute=bfloat16."
            ) from error
        return False
    return True


def attend(query_BGRSK: Array, key_BGTK: Array, value_BGTK: Array, rows: Marks, columns: Marks) -> Part:
    """Returns the part of the softmax over these keys; see `online_softmax.attend`. Outputs have the queries' dtype."""
    out_BSHK, log_weight_BHS = cudnn_attention_and_logarithm(
        _heads_last(query_BGRSK),
        _swap(key_BGTK),
        _swap(value_BGTK),
        mask=_mask(rows, columns),
        is_causal=rows.position_S is not None,
    )
    out_BGRSK = _split_heads(out_BSHK, key_BGTK.shape[1]).astype(jnp.float32)
    log_weight_BGRS = log_weight_BHS.reshape(out_BGRSK.shape[:-1])
    return Part(out_BGRSK, jnp.ones_like(log_weight_BGRS), log_weight_BGRS)


class Saved(NamedTuple):
    """The residuals of some queries for backward, and the gradient of their outputs."""

    query_BGRSK: Array
    gradient_BGRSK: Array
    out_BGRSK: Array
    log_weight_BGRS: Array


def save(split: Callable[[Array], Array], query: Array, gradient: Array, out: Array, log_weight: Array) -> Saved:
    """Returns the residuals of queries; see `online_softmax.save`."""
    return Saved(split(query), split(gradient), split(out), log_weight)


def attend_backward(
    saved: Saved, key_BGTK: Array, value_BGTK: Array, rows: Marks, columns: Marks
) -> tuple[Array, Array, Array]:
    """Returns the contribution of these keys to the gradients, float32; see `online_softmax.attend_backward`."""
    dquery, dkey, dvalue = cudnn_attention_gradients(
        _heads_last(saved.query_BGRSK),
        _swap(key_BGTK),
        _swap(value_BGTK),
        log_weight=jax.lax.collapse(saved.log_weight_BGRS, 1, 3),
        out=_heads_last(saved.out_BGRSK),
        gradient=_heads_last(saved.gradient_BGRSK),
        mask=_mask(rows, columns),
        is_causal=rows.position_S is not None,
    )
    dquery, dkey, dvalue = (x.astype(jnp.float32) for x in (dquery, dkey, dvalue))
    return _split_heads(dquery, key_BGTK.shape[1]), _swap(dkey), _swap(dvalue)


def _mask(rows: Marks, columns: Marks) -> Array | None:
    """Returns a mask of (B, 1, S, T) that keeps attention within a segment; None without segments."""
    if rows.segment_BS is None or columns.segment_BS is None:
        return None
    return rows.segment_BS[:, None, :, None] == columns.segment_BS[:, None, None, :]


def _heads_last(x_BGRSK: Array) -> Array:
    """Reshapes (B, G, R, S, K) to (B, S, H, K)."""
    B, G, R, S, K = x_BGRSK.shape
    return x_BGRSK.transpose(0, 3, 1, 2, 4).reshape(B, S, G * R, K)


def _split_heads(x_BSHK: Array, G: int) -> Array:
    """Reverses `_heads_last`."""
    B, S, H, K = x_BSHK.shape
    return x_BSHK.reshape(B, S, G, H // G, K).transpose(0, 2, 3, 1, 4)


def _swap(x_BGTK: Array) -> Array:
    """Reshapes (B, G, T, K) to (B, T, G, K), or back."""
    return x_BGTK.swapaxes(1, 2)
