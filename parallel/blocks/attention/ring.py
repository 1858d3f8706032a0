"""Ring attention: keys and values are sent around the devices of the axis `context`; all devices do equal work.

Letters: B rows, L positions of a row, l = L / N of them on one device, H query heads, G key-value heads, R = H / G
query heads that share one, K width of a head, C = 2 N chunks of S positions (T for keys), Z the two halves that a
device holds, Y keys and values.

Device r holds the chunks r (half 0) and C - 1 - r (half 1). In step i its queries attend to the keys of device
s = r - i mod N:

    i = 0     s = r    half 1 to all of half 0, each half to itself causally              3 products of S x S
    i > 0     s < r    half 1 to all of half 0, half 0 to all of half 0                   2 products
              s > r    half 1 to all of half 0, half 1 to all of half 1                   2 products

All devices therefore compute 2 N + 1 products per round, of the 4 N of the full square. Half 1 always attends to half
0; then one of the halves attends to the same half. Its number is an index into arrays: no branch, mask or shape depends
on it.

Forward. All permutes are to the next device, and each overlaps the products of its step:

    step 0           send own KV      | 3 products
    steps 1 .. N-2   forward KV       | 2 products
    step N-1                          | 2 products

Backward sends KV around the ring again, followed by the gradients of KV. These reach their own device after N - 1
permutes, because a device keeps its own contribution. The work of step 0 is split, so that the first and the last
permute overlap products too. Backward keeps queries, keys, values, outputs, and one float per query and head; autodiff
of the forward loop would keep the keys and values of every step, all L positions on each device.

    step 0           send own KV      | half 1 to half 0
    step 1           forward KV       | 2 products
    steps 2 .. N-2   forward KV, dKV  | 2 products
    step N-1         forward dKV      | 2 products
    step N           return dKV       | each half to itself
"""

from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....mesh.compat import varying_axes
from ...collectives import vary
from ...context import AXIS, ContextConfig, chunks_of
from ...xla.ordered_collectives import order_after
from ...xla.ring_hop import hop
from . import cudnn_parts, online_softmax
from .online_softmax import Marks, Part, finish, merge


def ring_attention(
    query_BlHK: Array,
    key_BlGK: Array,
    value_BlGK: Array,
    *,
    attend: Any = None,
    implementation: str = "xla",
    config: ContextConfig,
    segment_BL: Array | None = None,
) -> Array:
    """Runs causal attention over all positions of a row, which are split over the axis `context`.

    Args:
        query_BlHK: The queries at this device's `local_positions`, (B, l, H, K), any floating-point dtype.
        key_BlGK: The keys, (B, l, G, K), G a divisor of H.
        value_BlGK: The values, (B, l, G, K).
        attend: Unused: it has no parts that can be merged.
        implementation: "xla" for parts by `online_softmax.py`; "auto" for cuDNN if it supports the arrays
            (`cudnn_parts.py`); "cudnn" requires it.
        config: The strategy's options, N = `size` > 1.
        segment_BL: The segments of all positions, int32 (B, L), the same on all devices of the axis: a query attends
            only to keys of its own segment.

    Returns:
        (B, l, H, K), per-device, in the dtype of the query. Scores and softmax are float32 or wider.

    Raises:
        UserError: `implementation` is "cudnn", and cuDNN does not support the arrays.

    Source:
        Liu et al. 2023, "Ring Attention", section 3; Llama team 2024, section 3.3.2 (the two chunks).
    """
    segment_CBS = None
    if segment_BL is not None:
        segment_CBS = segment_BL.reshape(segment_BL.shape[0], config.num_chunks, -1).transpose(1, 0, 2)
    inputs = (query_BlHK, key_BlGK, value_BlGK)
    axes = sorted({AXIS}.union(*(varying_axes(x) for x in (*inputs, segment_CBS) if x is not None)))
    query, key, value = (vary(x, axes) for x in inputs)
    chunk = (x[:, : query.shape[1] // 2] for x in (*inputs, *([] if segment_BL is None else [segment_BL])))
    fused = implementation != "xla" and cudnn_parts.is_supported(implementation == "cudnn", *chunk)
    return _ring(query, key, value, segment_CBS, config, cudnn_parts if fused else online_softmax)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _ring(
    query: Array, key: Array, value: Array, segment_CBS: Array | None, config: ContextConfig, form: ModuleType
) -> Array:
    return _ring_forward(query, key, value, segment_CBS, config, form)[0]


def _ring_forward(
    query: Array, key: Array, value: Array, segment_CBS: Array | None, config: ContextConfig, form: ModuleType
) -> tuple[Array, Any]:
    query_ZBGRSK, kv_YZBGTK = _split_queries(query, key.shape[2]), _split_keys(key, value)
    rank, size, num_positions = lax.axis_index(AXIS), config.size, query.shape[1] // 2

    def see(half: Any, kv: Array, kv_half: Any, source: Any, causal: bool = False) -> Part:
        marks = _marks(segment_CBS, config, half, kv_half, source, num_positions if causal else 0)
        key, value = _pick(kv, kv_half, 1)
        return form.attend(_pick(query_ZBGRSK, half), key, value, *marks)

    def visit(parts: Part, kv: Array, step: Any) -> Part:
        source = (rank - step) % size
        parts = _merge_into(parts, 1, see(1, kv, 0, source))
        same = (source > rank).astype(jnp.int32)
        return _merge_into(parts, same, see(same, kv, same, source))

    def body(carry: tuple[Part, Array], step: Array) -> tuple[tuple[Part, Array], None]:
        parts, kv = carry
        return (visit(parts, kv, step), _send(kv, config)), None

    arriving = _send(kv_YZBGTK, config)
    early, late = (see(half, kv_YZBGTK, half, rank, causal=True) for half in (0, 1))
    late = merge(late, see(1, kv_YZBGTK, 0, rank))
    parts = jax.tree.map(lambda *halves: jnp.stack(halves), early, late)
    (parts, kv), _ = _loop(body, (parts, arriving), range(1, size - 1))
    out_ZBGRSK, log_weight_ZBGRS = finish(visit(parts, kv, size - 1))
    out = _join_queries(out_ZBGRSK).astype(query.dtype)
    return out, (query, key, value, segment_CBS, out, log_weight_ZBGRS)


def _ring_backward(
    config: ContextConfig, form: ModuleType, residuals: Any, gradient: Array
) -> tuple[Array, Array, Array, None]:
    query, key, value, segment_CBS, out, log_weight_ZBGRS = residuals
    rank, size, num_positions = lax.axis_index(AXIS), config.size, query.shape[1] // 2
    saved_Z = form.save(partial(_split_queries, G=key.shape[2]), query, gradient, out, log_weight_ZBGRS)
    value, key = order_after((out, gradient), (value, key))  # also of a recomputed forward
    vk_YZBGTK = _split_keys(value, key)  # not as in forward: XLA would keep what its first permute brought

    def see(half: Any, vk: Array, vk_half: Any, source: Any, causal: bool = False) -> tuple[Array, Array]:
        marks = _marks(segment_CBS, config, half, vk_half, source, num_positions if causal else 0)
        saved = type(saved_Z)(*(_pick(x, half) for x in saved_Z))
        value, key = _pick(vk, vk_half, 1)
        dquery, dkey, dvalue = form.attend_backward(saved, key, value, *marks)
        return dquery, jnp.stack([dvalue, dkey])

    def visit(dquery_Z: Array, vk: Array, step: Any) -> tuple[Array, Array]:
        source = (rank - step) % size
        dquery, dvk = see(1, vk, 0, source)
        dquery_Z, dvk_YZ = _add_into(dquery_Z, 1, dquery), jnp.stack([dvk, jnp.zeros_like(dvk)], axis=1)
        same = (source > rank).astype(jnp.int32)
        dquery, dvk = see(same, vk, same, source)
        return _add_into(dquery_Z, same, dquery), _add_into(dvk_YZ, same, dvk, 1)

    def body(carry: tuple[Array, Array, Array], step: Array) -> tuple[tuple[Array, Array, Array], None]:
        dquery_Z, vk, dvk = carry
        dquery_Z, contribution = visit(dquery_Z, vk, step)
        return (dquery_Z, _send(vk, config), _send(dvk, config) + contribution), None

    arriving = _send(vk_YZBGTK, config)
    dquery, dvk_home = see(1, vk_YZBGTK, 0, rank)
    dquery_Z = jnp.stack([jnp.zeros_like(dquery), dquery])
    dvk_home = jnp.stack([dvk_home, jnp.zeros_like(dvk_home)], axis=1)
    vk = _send(arriving, config) if size > 2 else arriving
    dquery_Z, dvk = visit(dquery_Z, arriving, 1)
    (dquery_Z, vk, dvk), _ = _loop(body, (dquery_Z, vk, dvk), range(2, size - 1))
    if size > 2:
        dquery_Z, contribution = visit(dquery_Z, vk, size - 1)
        dvk = _send(dvk, config) + contribution
    arriving = _send(dvk, config)
    for half in (0, 1):
        dquery, dvk = see(half, vk_YZBGTK, half, rank, causal=True)
        dquery_Z, dvk_home = _add_into(dquery_Z, half, dquery), _add_into(dvk_home, half, dvk, 1)
    dvalue, dkey = (_join_keys(x).astype(key.dtype) for x in dvk_home + arriving)
    return _join_queries(dquery_Z).astype(query.dtype), dkey, dvalue, None


_ring.defvjp(_ring_forward, _ring_backward)


def _send(x: Array, config: ContextConfig) -> Array:
    """Sends `x` to the next device, and returns the array of the previous one."""
    return hop(x, AXIS, config.size)


def _marks(
    segment_CBS: Array | None, config: ContextConfig, half: Any, kv_half: Any, source: Any, num_positions: int
) -> tuple[Marks, Marks]:
    """Returns the marks of a half of this device and of device `source`; causal if `num_positions` is positive."""
    position = jnp.arange(num_positions, dtype=jnp.int32) if num_positions else None
    if segment_CBS is None:
        return Marks(position), Marks(position)
    row, column = chunks_of(lax.axis_index(AXIS), config), chunks_of(source, config)
    row_segment_BS = _pick(segment_CBS, jnp.where(half == 0, *row))
    return Marks(position, row_segment_BS), Marks(position, _pick(segment_CBS, jnp.where(kv_half == 0, *column)))


def _loop(body: Any, carry: Any, steps: range) -> Any:
    """Scans over the steps, if there are any."""
    return lax.scan(body, carry, jnp.asarray(steps, jnp.int32)) if steps else (carry, None)


def _pick(x: Array, half: Any, dim: int = 0) -> Array:
    return lax.dynamic_index_in_dim(x, half, dim, keepdims=False)


def _add_into(x: Array, half: Any, change: Array, dim: int = 0) -> Array:
    return lax.dynamic_update_index_in_dim(x, _pick(x, half, dim) + change, half, dim)


def _merge_into(parts: Part, half: Any, part: Part) -> Part:
    merged = merge(Part(*(_pick(x, half) for x in parts)), part)
    return Part(*(lax.dynamic_update_index_in_dim(x, y, half, 0) for x, y in zip(parts, merged, strict=True)))


def _split_queries(x_BlHK: Array, G: int) -> Array:
    """Reshapes (B, l, H, K) to (Z, B, G, R, S, K)."""
    B, l, H, K = x_BlHK.shape
    return x_BlHK.reshape(B, 2, l // 2, G, H // G, K).transpose(1, 0, 3, 4, 2, 5)


def _join_queries(x_ZBGRSK: Array) -> Array:
    """Reverses `_split_queries`."""
    Z, B, G, R, S, K = x_ZBGRSK.shape
    return x_ZBGRSK.transpose(1, 0, 4, 2, 3, 5).reshape(B, Z * S, G * R, K)


def _split_keys(key_BlGK: Array, value_BlGK: Array) -> Array:
    """Stacks two (B, l, G, K) arrays to (Y, Z, B, G, T, K)."""
    B, l, G, K = key_BlGK.shape
    return jnp.stack([key_BlGK, value_BlGK]).reshape(2, B, 2, l // 2, G, K).transpose(0, 2, 1, 4, 3, 5)


def _join_keys(x_ZBGTK: Array) -> Array:
    """Reshapes (Z, B, G, T, K) to (B, l, G, K)."""
    Z, B, G, T, K = x_ZBGTK.shape
    return x_ZBGTK.transpose(1, 0, 3, 2, 4).reshape(B, Z * T, G, K)
