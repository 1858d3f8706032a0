"""Which blocks of a model live on which pipeline stage, and the order in which they are stored.

A schedule cuts the model into S x V positions (V chunks on each of S stages). Each position holds some blocks that
follow one another, as equally many as can be, or as many as `strategy.pipe.layers` says. Dim 0 of the leaves under
"blocks" is stored stage by stage, chunk by chunk, so that splitting it over the mesh axis `pipe` gives every stage its
own; positions with fewer blocks than the largest are filled up with rows that nothing reads:

    8 blocks, S = 2, V = 2, "loop"     positions 0 2 | 1 3     stored 0 1 4 5 | 2 3 6 7
    5 blocks, S = 2, V = 1             positions 0 | 1         stored 0 1 2 | 3 4 -
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...mesh.errors import UserError
from .table import Schedule


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Where the blocks are; see `assign`.

    Attributes:
        stages: S, the size of the mesh axis `pipe`.
        chunks: V, positions on each stage.
        counts: [stage][chunk]: how many blocks that position holds.
        starts: [stage][chunk]: the first of them.
    """

    stages: int
    chunks: int
    counts: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]

    @property
    def slots(self) -> int:
        """Rows stored for each position: the blocks of the largest."""
        return max(max(row) for row in self.counts)

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return sum(map(sum, self.counts))

    @property
    def order(self) -> np.ndarray:
        """The block in each row of the stored dim 0, (S x V x slots,) int; -1 where a row is filled up."""
        order = np.full((self.stages, self.chunks, self.slots), -1)
        for stage in range(self.stages):
            for chunk in range(self.chunks):
                count, start = self.counts[stage][chunk], self.starts[stage][chunk]
                order[stage, chunk, :count] = np.arange(start, start + count)
        return order.reshape(-1)

    @property
    def num_filling(self) -> int:
        """Rows that are filled up."""
        return len(self.order) - self.num_blocks

    @property
    def is_natural(self) -> bool:
        """Whether blocks are stored in the model's own order, with no row filled up."""
        return np.array_equal(self.order, np.arange(self.num_blocks))

    def to_storage(self, blocks: Any) -> Any:
        """Puts blocks into the order they are stored in.

        Args:
            blocks: A tree of arrays, dim 0 counts the blocks of the model; global.

        Returns:
            The tree with dim 0 as `order` has it, 0 in rows that are filled up.
        """
        if self.is_natural:
            return blocks
        order = self.order

        def store(leaf: Array) -> Array:
            stored = jnp.take(leaf, np.maximum(order, 0), axis=0)
            filled = (order < 0).reshape(-1, *[1] * (leaf.ndim - 1))
            return jnp.where(filled, jnp.zeros((), leaf.dtype), stored) if filled.any() else stored

        return jax.tree.map(store, blocks)

    def to_natural(self, stored: Any) -> Any:
        """Undoes `to_storage`: dim 0 counts the blocks of the model again."""
        if self.is_natural:
            return stored
        rows = np.argsort(self.order, kind="stable")[np.count_nonzero(self.order < 0) :]
        return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0), stored)


def assign(num_blocks: int, schedule: Schedule, layers: Sequence[int] = ()) -> Stages:
    """Deals the blocks of a model out to the positions of a schedule.

    Args:
        num_blocks: Blocks of the model.
        schedule: Its stages, chunks and placement.
        layers: How many blocks each position holds, in the order of the model; () for as equally many as can be, the
            first positions taking what is left over (the last has the head besides).

    Raises:
        UserError: There are fewer blocks than positions, or `layers` does not add up.
    """
    positions = schedule.num_positions
    problem = _problem(num_blocks, schedule, layers)
    if problem:
        raise UserError(problem)
    base, extra = divmod(num_blocks, positions)
    sizes = list(layers) or [base + (position < extra) for position in range(positions)]
    starts = [sum(sizes[:position]) for position in range(positions)]
    at = [[schedule.position(stage, chunk) for chunk in range(schedule.chunks)] for stage in range(schedule.stages)]
    return Stages(
        stages=schedule.stages,
        chunks=schedule.chunks,
        counts=tuple(tuple(sizes[position] for position in row) for row in at),
        starts=tuple(tuple(starts[position] for position in row) for row in at),
    )


def _problem(num_blocks: int, schedule: Schedule, layers: Sequence[int]) -> str | None:
    positions = schedule.num_positions
    chunks = f" x {schedule.chunks} chunks each" if schedule.chunks > 1 else ""
    pieces = f"{schedule.stages} stages{chunks} ({schedule.name})"
    if not layers and num_blocks < positions:
        virtual = ", strategy.pipe.virtual" if schedule.chunks > 1 else ""
        return (
            f"model.layers={num_blocks} cannot be dealt out to {pieces}: {positions} pieces of the model, each with a "
            f"layer at least. Set model.layers to {positions} or more, or lower strategy.pipe.size{virtual}."
        )
    if layers and (len(layers) != positions or sum(layers) != num_blocks or min(layers) < 0):
        return (
            f"strategy.pipe.layers={list(layers)} names {len(layers)} pieces with {sum(layers)} layers, but {pieces} "
            f"make {positions} pieces and model.layers={num_blocks}. Give {positions} numbers, none below 0, that add "
            f"up to {num_blocks}, in the order of the model; or leave strategy.pipe.layers out for an even cut."
        )
    return None
