"""The split of the transformer's work over `tensor` and `context`: dims, invalid sizes, and traffic."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ..mesh.axes import divisors
from ..parallel import context, tensor
from ..parallel.collectives import Collective, Traffic, wire_bytes
from ..parallel.model import ParallelContext
from .transformer_config import TransformerConfig


def split_rules(config: TransformerConfig, parallel: ParallelContext) -> dict[str, tuple[str | None, ...]]:
    """Returns the split dims of the parameters; {} if `tensor` does not split.

    Returns:
        Regular expression of a parameter's path -> mesh axis or None of each dim.
    """
    if parallel.tensor.size == 1:
        return {}
    axis = tensor.AXIS
    split_kv = tensor.key_value_rule(parallel.tensor, config.num_kv_heads) == "split"
    return {
        "embed/tokens": (axis, None),
        "head/logits": (None, axis),
        "blocks/attention/query": (None, None, axis),
        "blocks/attention/(key|value)": (None, None, axis if split_kv else None),
        "blocks/attention/out": (None, axis, None),
        "blocks/mlp/(gate|up)": (None, None, axis),
        "blocks/mlp/down": (None, axis, None),
        "blocks/attention/query_bias": (None, axis),
        "blocks/attention/(key|value)_bias": (None, axis if split_kv else None),
        "blocks/mlp/(gate|up)_bias": (None, axis),
    }


def split_problems(config: TransformerConfig, parallel: ParallelContext) -> list[str]:
    """Returns all sizes that the mesh does not divide, each with valid ones."""
    size, problems = parallel.tensor.size, []
    wholes = {"model.heads": config.heads, "model.mlp_width": config.mlp_size, "model.vocabulary": config.vocabulary}
    fitting = [n for n in divisors(size) if all(whole % n == 0 for whole in wholes.values())]
    for key, whole in wholes.items():
        if whole % size:
            problems.append(
                f"{key}={whole} cannot be split over strategy.tensor={size}: {whole} % {size} = {whole % size}. "
                f"Set {key} to {_next_multiple(config, key, whole, size)}, or strategy.tensor to one of "
                f"{fitting}."
            )
    if problems:
        return problems
    problems = context.size_problems(parallel.context, config.length, config.heads // size)
    held = config.length // parallel.context.size
    if not problems and held % size:
        step = size * parallel.context.num_chunks
        problems.append(
            f"data.length={config.length}: {held} positions on each device along context cannot be split over "
            f"strategy.tensor={size}: {held} % {size} = {held % size}. Set data.length to a multiple of {step}."
        )
    return problems


def _next_multiple(config: TransformerConfig, key: str, whole: int, size: int) -> int:
    """Returns a multiple of `size` near a size; for heads, one that also divides the width into even parts."""
    above = whole + size - whole % size
    if key != "model.heads" or config.head_width:
        return above
    fits = [heads for heads in divisors(config.width) if heads % size == 0 and config.width // heads % 2 == 0]
    return min(fits, key=lambda heads: abs(heads - whole), default=above)


def _kv_heads_on_device(config: TransformerConfig, parallel: ParallelContext) -> int:
    rule = tensor.key_value_rule(parallel.tensor, config.num_kv_heads)
    size = parallel.tensor.size
    return {"split": config.num_kv_heads // size, "one": 1, "per query": config.heads // size}[rule]


def traffic(
    config: TransformerConfig,
    parallel: ParallelContext,
    part: str,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    dtype: str,
    platform: str,
) -> Traffic:
    """Returns the traffic of one call of "embed", "block" or "head", for the per-device shapes of a batch."""
    rows, length = shapes["inputs"].shape
    residual = residual_bytes(config, parallel, shapes, dtype, platform)
    if part == "block":
        attention = attention_traffic(config, parallel, rows, length, residual, dtype, platform)
        around = around_products(parallel, residual)
        return attention.and_then(Traffic(around, around, around[:1]))
    if parallel.tensor.size == 1:
        return Traffic()
    gather, scatter = _line("all-gather", residual), _line("reduce-scatter", residual)
    if part == "embed":
        return Traffic((scatter,), (gather,))
    wide = wire_bytes(jnp.promote_types(dtype, jnp.float32), platform)
    positions = rows * (length // parallel.context.size) * wide
    largest, sums = _line("all-reduce", positions), _line("reduce-scatter", 2 * positions)
    return Traffic((gather, largest, sums), (_line("all-gather", 2 * positions), scatter))


def residual_bytes(
    config: TransformerConfig,
    parallel: ParallelContext,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    dtype: str,
    platform: str,
) -> int:
    """Returns the bytes of the residual stream at all positions of this device's `context` group."""
    rows, length = shapes["inputs"].shape
    return rows * length // parallel.context.size * config.width * wire_bytes(dtype, platform)


def attention_traffic(
    config: TransformerConfig,
    parallel: ParallelContext,
    rows: int,
    length: int,
    residual: int,
    dtype: str,
    platform: str,
) -> Traffic:
    """Returns the traffic of the first half of a block: attention, with a gather and a scatter of the positions."""
    moved = context.traffic(
        parallel.context,
        rows=rows,
        length=length,
        heads=config.heads // parallel.tensor.size,
        kv_heads=_kv_heads_on_device(config, parallel),
        head_size=config.head_size,
        dtype=dtype,
        platform=platform,
    )
    around = around_products(parallel, residual)
    attention = (*around, *moved.forward)
    return Traffic(attention, (*around, *moved.backward), attention)


def around_products(parallel: ParallelContext, residual: int, *, ring: bool = True) -> tuple[Collective, ...]:
    """Returns the gather before a half of a block and the scatter after it; its gradient has the same two.

    Args:
        parallel: The split.
        residual: Bytes of all positions of this device's `context` group.
        ring: The half supports a ring, which the strategy can select.
    """
    size = parallel.tensor.size
    if size == 1:
        return ()
    if not (ring and parallel.tensor.collective_matmul):
        return _line("all-gather", residual), _line("reduce-scatter", residual)
    permutes = size - 1  # one for each other device
    walk = Collective("collective-permute", (tensor.AXIS,), permutes, permutes * residual // size)
    return walk, walk


def _line(kind: str, num_bytes: int) -> Collective:
    return Collective(kind, (tensor.AXIS,), 1, num_bytes)
