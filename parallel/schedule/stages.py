"""The assignment of blocks to pipeline stages, and the order in which they are stored.

A schedule splits the model into S x V virtual stages, V on each of S stages. Each virtual stage has consecutive blocks,
split as evenly as possible or as given by `strategy.pipe.layers`. Dim 0 of the leaves under "blocks" is stored stage by
stage, chunk by chunk, so that splitting it over the mesh axis `pipe` gives every stage its own blocks. Empty slots
contain zeros, which are never read:

    8 blocks, S = 2, V = 2, "loop"     virtual stages 0 2 | 1 3     stored 0 1 4 5 | 2 3 6 7
    5 blocks, S = 2, V = 1             virtual stages 0 | 1         stored 0 1 2 | 3 4 -

`sharding/stored_order.py` puts arrays into this order and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...mesh.errors import UserError
from .schedule_table import Schedule


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The positions of the blocks; see `assign`.

    Attributes:
        stages: S, the size of the mesh axis `pipe`.
        chunks: V, the virtual stages on each stage.
        counts: [stage][chunk]: The number of blocks on that virtual stage.
        starts: [stage][chunk]: The first block of that virtual stage.
    """

    stages: int
    chunks: int
    counts: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]

    @property
    def slots(self) -> int:
        """The number of slots stored for each virtual stage: the blocks of the largest one."""
        return max(map(max, self.counts))

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the model."""
        return sum(map(sum, self.counts))

    @property
    def order(self) -> np.ndarray:
        """The block in each slot of the stored dim 0, (S x V x slots,) int; -1 for an empty slot."""
        order = np.full((self.stages, self.chunks, self.slots), -1)
        for stage in range(self.stages):
            for chunk in range(self.chunks):
                count, start = self.counts[stage][chunk], self.starts[stage][chunk]
                order[stage, chunk, :count] = np.arange(start, start + count)
        return order.reshape(-1)

    @property
    def is_natural(self) -> bool:
        """True if blocks are stored in the model's own order, without empty slots."""
        return np.array_equal(self.order, np.arange(self.num_blocks))


def assign(num_blocks: int, schedule: Schedule, layers: Sequence[int] = ()) -> Stages:
    """Assigns the blocks of a model to the virtual stages of a schedule.

    Args:
        num_blocks: The number of blocks in the model.
        schedule: The schedule, with its stages, chunks and placement.
        layers: The number of blocks on each virtual stage, in the order of the model; () for as even as possible, with
            one more on the first ones if there is a remainder (the last one also has the head).

    Raises:
        UserError: There are fewer blocks than virtual stages, or `layers` does not add up.
    """
    count = schedule.num_virtual_stages
    kind = "virtual stages" if schedule.chunks > 1 else "stages"
    chunks = f" x {schedule.chunks} chunks = {count} {kind}" if schedule.chunks > 1 else ""
    cut = f"{schedule.stages} stages{chunks} ({schedule.name})"
    if not layers and num_blocks < count:
        raise UserError(
            f"model.layers={num_blocks} cannot be split over {cut}: each needs at least one layer, and {num_blocks} < "
            f"{count}. Set model.layers to {count} or more, or lower strategy.pipe.size or strategy.pipe.virtual."
        )
    if layers and (len(layers) != count or sum(layers) != num_blocks or min(layers) < 0):
        raise UserError(
            f"strategy.pipe.layers={list(layers)} names {len(layers)} {kind} with {sum(layers)} layers, but there "
            f"are {cut} and model.layers={num_blocks}. Give {count} numbers, none below 0, that add up to "
            f"{num_blocks}, in the order of the model; or leave strategy.pipe.layers out for an even cut."
        )
    base, extra = divmod(num_blocks, count)
    sizes = list(layers) or [base + (virtual < extra) for virtual in range(count)]
    starts = [sum(sizes[:virtual]) for virtual in range(count)]
    own = [
        [schedule.virtual_stage(stage, chunk) for chunk in range(schedule.chunks)] for stage in range(schedule.stages)
    ]
    return Stages(
        stages=schedule.stages,
        chunks=schedule.chunks,
        counts=tuple(tuple(sizes[virtual] for virtual in each) for each in own),
        starts=tuple(tuple(starts[virtual] for virtual in each) for each in own),
    )
