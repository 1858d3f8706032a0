"""Which blocks of a model live on which pipeline stage, and the order in which they are stored.

A schedule cuts the model into S x V virtual stages, V on each of S stages. Each holds some blocks that follow one
another, as equally many as can be, or as many as `strategy.pipe.layers` says. Dim 0 of the leaves under "blocks" is
stored stage by stage, chunk by chunk, so that splitting it over the mesh axis `pipe` gives every stage its own. Slots
that a virtual stage has no block for are filled with zeros, which nothing reads:

    8 blocks, S = 2, V = 2, "loop"     virtual stages 0 2 | 1 3     stored 0 1 4 5 | 2 3 6 7
    5 blocks, S = 2, V = 1             virtual stages 0 | 1         stored 0 1 2 | 3 4 -

`sharding/stored_order.py` puts arrays into this order and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...mesh.errors import UserError
from .table import Schedule


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Where the blocks are; see `assign`.

    Attributes:
        stages: S, the size of the mesh axis `pipe`.
        chunks: V, virtual stages on each stage.
        counts: [stage][chunk]: how many blocks that virtual stage holds.
        starts: [stage][chunk]: the first of them.
    """

    stages: int
    chunks: int
    counts: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]

    @property
    def slots(self) -> int:
        """Slots stored for each virtual stage: the blocks of the largest."""
        return max(map(max, self.counts))

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return sum(map(sum, self.counts))

    @property
    def order(self) -> np.ndarray:
        """The block in each slot of the stored dim 0, (S x V x slots,) int; -1 where a slot holds none."""
        order = np.full((self.stages, self.chunks, self.slots), -1)
        for stage in range(self.stages):
            for chunk in range(self.chunks):
                count, start = self.counts[stage][chunk], self.starts[stage][chunk]
                order[stage, chunk, :count] = np.arange(start, start + count)
        return order.reshape(-1)

    @property
    def num_filling(self) -> int:
        """Slots that hold no block."""
        return len(self.order) - self.num_blocks

    @property
    def is_natural(self) -> bool:
        """Whether blocks are stored in the model's own order, one in each slot."""
        return np.array_equal(self.order, np.arange(self.num_blocks))


def assign(num_blocks: int, schedule: Schedule, layers: Sequence[int] = ()) -> Stages:
    """Deals the blocks of a model out to the virtual stages of a schedule.

    Args:
        num_blocks: Blocks of the model.
        schedule: Its stages, chunks and placement.
        layers: How many blocks each virtual stage holds, in the order of the model; () for as equally many as can be,
            where the first ones take what is left over (the last has the head besides).

    Raises:
        UserError: There are fewer blocks than virtual stages, or `layers` does not add up.
    """
    count = schedule.num_virtual_stages
    problem = _problem(num_blocks, schedule, layers)
    if problem:
        raise UserError(problem)
    base, extra = divmod(num_blocks, count)
    sizes = list(layers) or [base + (virtual < extra) for virtual in range(count)]
    starts = [sum(sizes[:virtual]) for virtual in range(count)]
    chunks = range(schedule.chunks)
    own = [[schedule.virtual_stage(stage, chunk) for chunk in chunks] for stage in range(schedule.stages)]
    return Stages(
        stages=schedule.stages,
        chunks=schedule.chunks,
        counts=tuple(tuple(sizes[virtual] for virtual in each) for each in own),
        starts=tuple(tuple(starts[virtual] for virtual in each) for each in own),
    )


def _problem(num_blocks: int, schedule: Schedule, layers: Sequence[int]) -> str | None:
    count = schedule.num_virtual_stages
    kind, several = ("virtual stages", True) if schedule.chunks > 1 else ("stages", False)
    chunks = f" x {schedule.chunks} chunks = {count} {kind}" if several else ""
    cut = f"{schedule.stages} stages{chunks} ({schedule.name})"
    if not layers and num_blocks < count:
        virtual = " or strategy.pipe.virtual" if several else ""
        return (
            f"model.layers={num_blocks} cannot be dealt out to {cut}: each needs a layer at least, and "
            f"{num_blocks} < {count}. Set model.layers to {count} or more, or lower strategy.pipe.size{virtual}."
        )
    if layers and (len(layers) != count or sum(layers) != num_blocks or min(layers) < 0):
        return (
            f"strategy.pipe.layers={list(layers)} names {len(layers)} {kind} with {sum(layers)} layers, but there "
            f"are {cut} and model.layers={num_blocks}. Give {count} numbers, none below 0, that add up to "
            f"{num_blocks}, in the order of the model; or leave strategy.pipe.layers out for an even cut."
        )
    return None
