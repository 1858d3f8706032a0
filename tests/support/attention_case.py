"""Attention over the axis `context` and on one device, for the same random rows; outputs and gradients of both."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from spmdkit.models.attention import causal_attention
from spmdkit.parallel.blocks.attention.methods import ATTENTION
from spmdkit.parallel.context import local_positions, traffic
from spmdkit.parallel.xla.census import census
from support import toy

ROWS, LENGTH, HEADS, HEAD_SIZE = 2, 32, 8, 4


class Case(NamedTuple):
    """Queries, keys, values, the gradient of the output, and the document of each position."""

    arrays: tuple[np.ndarray, ...]
    segment: np.ndarray | None


def make_case(kv_heads, *, packed=False, dtype=np.float64):
    random = np.random.default_rng(kv_heads)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    arrays = tuple(random.normal(size=(ROWS, LENGTH, n, HEAD_SIZE)).astype(dtype) for n in heads)
    return Case(arrays, np.cumsum(random.random((ROWS, LENGTH)) < 0.15, axis=1).astype(np.int32) if packed else None)


def mixing(config, **options):
    """The attention of a config, from positional arrays; the last may be the segments."""

    def mix(query, key, value, segment=None):
        method = ATTENTION[config.attention]
        return method(query, key, value, attend=causal_attention, config=config, segment_BL=segment, **options)

    return mix


def with_gradients(mix):
    """(output, gradients of query, key and value) of an attention."""

    def run(query, key, value, gradient, *segment):
        output, backward = jax.vjp(lambda *arrays: mix(*arrays, *segment), query, key, value)
        return output, *backward(gradient)

    return run


def on_mesh(run, config, case, num_outputs=4, **other_axes):
    """Compiles `run` over `context` (and rows over other axes).

    Returns:
        Its results on whole rows in the order of positions, and its collectives.
    """
    mesh = toy.mesh(**other_axes, context=config.size)
    rows = tuple(other_axes) or None
    part = PartitionSpec(rows, "context")
    segments = () if case.segment is None else (case.segment,)
    specs = (*[part] * len(case.arrays), *[PartitionSpec(rows)] * len(segments))
    order = held_by_all(LENGTH, config)
    mapped = jax.jit(
        jax.shard_map(run, mesh=mesh.backend_mesh, in_specs=specs, out_specs=(part,) * num_outputs, check_vma=True)
    )
    inputs = [jnp.asarray(x[:, order]) for x in case.arrays] + [jnp.asarray(x) for x in segments]
    compiled = mapped.lower(*inputs).compile()
    return [np.asarray(x)[:, np.argsort(order)] for x in compiled(*inputs)], census(compiled.as_text(), mesh)


def on_one_device(case):
    """The same results without a mesh."""
    segments = () if case.segment is None else (case.segment,)
    return jax.jit(with_gradients(causal_attention))(*case.arrays, *segments)


def held_by_all(length, config):
    """Positions held by device 0, 1, ... one after the other."""
    mesh = toy.mesh(context=config.size).backend_mesh
    held = jax.shard_map(
        lambda: local_positions(length, config), mesh=mesh, in_specs=(), out_specs=PartitionSpec("context")
    )
    return np.asarray(jax.jit(held)()) if config.size > 1 else np.asarray(local_positions(length, config))


def predicted(config, kv_heads, rows=ROWS, dtype="float64"):
    head = rows * LENGTH // config.size * HEAD_SIZE
    return traffic(config, head=head, heads=HEADS, kv_heads=kv_heads, dtype=dtype, platform="cpu")
