"""The split of the transformer's work over `tensor` and `context`: dims, invalid sizes, and traffic."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..mesh.axes import divisors
from ..parallel import context, expert, tensor
from ..parallel.collectives import Collective, Traffic, wire_bytes
from ..parallel.model import ParallelContext
from .layers import count_chunks
from .transformer_config import TransformerConfig

Rules = dict[str, tuple[str | None, ...]]
"""Regular expression of a parameter's path -> mesh axis or None of each dim."""


@dataclass(frozen=True)
class SplitTransformer:
    """A transformer with its work split over a mesh.

    Attributes:
        config: Sizes and options, with vocabulary and length.
        parallel: The parallel context.
    """

    config: TransformerConfig
    parallel: ParallelContext

    @property
    def rules(self) -> Rules:
        """The split dims of the parameters; {} if `tensor` does not split."""
        if self.parallel.tensor.size == 1:
            return {}
        axis = tensor.AXIS
        split_kv = tensor.key_value_rule(self.parallel.tensor, self.config.num_kv_heads) == "split"
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

    def problems(self) -> list[str]:
        """Returns all sizes that are missing or that the mesh does not divide, each with valid ones."""
        config, size = self.config, self.parallel.tensor.size
        if missing := [name for name in ("vocabulary", "length") if not getattr(config, name)]:
            return [f"model.{name} is missing, and the data does not determine it." for name in missing]
        names = ("heads", "mlp_width", "vocabulary")
        wholes = dict(zip(names, (config.heads, config.mlp_size, config.vocabulary), strict=True))
        fitting = [n for n in divisors(size) if all(whole % n == 0 for whole in wholes.values())]
        problems = [
            f"model.{name}={whole} cannot be split over strategy.tensor={size}: {whole} % {size} = {whole % size}. "
            f"Set model.{name} to {whole + size - whole % size}, or strategy.tensor to one of {fitting}."
            for name, whole in wholes.items()
            if whole % size
        ]
        if not problems:
            problems = [*context.size_problems(self.parallel.context, config.length, config.heads // size)]
        held = config.length // self.parallel.context.size
        if not problems and held % size:
            step = size * self.parallel.context.num_chunks
            problems.append(
                f"data.length={config.length}: {held} positions on each device along context cannot be split over "
                f"strategy.tensor={size}: {held} % {size} = {held % size}. Set data.length to a multiple of {step}."
            )
        return [*problems, *expert.size_problems(self.parallel.expert, getattr(config, "experts", 0))]

    def traffic(self, part: str, shapes: Mapping[str, jax.ShapeDtypeStruct], dtype: str, platform: str) -> Traffic:
        """Returns the traffic of one call of "embed", "block" or "head", for the per-device shapes of a batch."""
        rows, length = shapes["inputs"].shape
        residual = self.residual_bytes(rows, length, dtype, platform)
        if part == "block":
            around = self.around_products(residual)
            attention = self.attention_traffic(rows, length, dtype, platform)
            return attention.and_then(Traffic(around, around, around[:1]))
        if self.parallel.tensor.size == 1:
            return Traffic()
        gather, scatter = _line("all-gather", residual), _line("reduce-scatter", residual)
        if part == "embed":
            return Traffic((scatter,), (gather,))
        wide = wire_bytes(jnp.promote_types(dtype, jnp.float32), platform)
        positions = rows * (length // self.parallel.context.size) * wide
        largest, sums = _line("all-reduce", positions), _line("reduce-scatter", 2 * positions)
        back = _line("all-gather", 2 * positions)
        chunks = max(1, self.loss_chunks(rows, length // self.parallel.context.size, dtype))
        largest, sums, back = (replace(line, count=chunks) for line in (largest, sums, back))
        return Traffic((gather, largest, sums), (back, scatter))

    def loss_chunks(self, rows: int, held: int, dtype: Any) -> int:
        """Returns the chunks of the loss, see `layers.count_chunks`.

        Args:
            rows: Rows on one device.
            held: Positions of this device's `context` group.
            dtype: The compute dtype.
        """
        return count_chunks(rows, held // self.parallel.tensor.size, self.config.vocabulary, dtype)

    def residual_bytes(self, rows: int, length: int, dtype: str, platform: str) -> int:
        """Returns the bytes of the residual stream at all positions of this device's `context` group."""
        return rows * length // self.parallel.context.size * self.config.width * wire_bytes(dtype, platform)

    def attention_traffic(self, rows: int, length: int, dtype: str, platform: str) -> Traffic:
        """Returns the traffic of the first half of a block: attention, with a gather and a scatter of the positions."""
        split, size, kv_heads = self.parallel.context, self.parallel.tensor.size, self.config.num_kv_heads
        rule, heads = tensor.key_value_rule(self.parallel.tensor, kv_heads), self.config.heads // size
        held = {"split": kv_heads // size, "one": 1, "per query": heads}[rule]
        head = rows * length // split.size * self.config.head_size
        moved = context.traffic(split, head=head, heads=heads, kv_heads=held, dtype=dtype, platform=platform)
        around = self.around_products(self.residual_bytes(rows, length, dtype, platform))
        attention = (*around, *moved.forward)
        return Traffic(attention, (*around, *moved.backward), attention)

    def around_products(self, residual: int, *, ring: bool = True) -> tuple[Collective, ...]:
        """Returns the gather before a half of a block and the scatter after it; its gradient has the same two.

        Args:
            residual: Bytes of all positions of this device's `context` group.
            ring: The half supports a ring, which the strategy can select.
        """
        size = self.parallel.tensor.size
        if size == 1:
            return ()
        if not (ring and self.parallel.tensor.collective_matmul):
            return _line("all-gather", residual), _line("reduce-scatter", residual)
        permutes = size - 1  # one for each other device
        walk = Collective("collective-permute", (tensor.AXIS,), permutes, permutes * residual // size)
        return walk, walk


def _line(kind: str, num_bytes: int) -> Collective:
    return Collective(kind, (tensor.AXIS,), 1, num_bytes)
