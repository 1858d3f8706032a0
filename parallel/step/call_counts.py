"""How often one step runs each part of a model on a device: what turns the traffic of a part into that of a step."""

from collections.abc import Mapping
from typing import NamedTuple

from ..model import BlockModel, Model
from ..schedule.timetable import Timetable, most_turns


class Calls(NamedTuple):
    """Calls in one step, microbatches and recomputation counted.

    In a pipeline stages differ: each figure is that of the stage where it is largest.

    Attributes:
        embed: of the embedding, forward.
        embed_backward: of its gradient.
        block: of a block, forward.
        block_again: of a block, forward for what backward needs, in an action of its own.
        block_backward: of a block, backward to its input.
        block_weight: of a block, backward to its parameters.
        head: of the head, forward and backward.
        rows: blocks that a device stores.
        outer_gradients: how often a group of parameters outside the blocks gets a gradient.
        others: the same for a parameter in no group.
    """

    embed: int
    embed_backward: int
    block: int
    block_again: int
    block_backward: int
    block_weight: int
    head: int
    rows: int
    outer_gradients: Mapping[str, int]
    others: int


def plain_calls(model: Model | BlockModel, accumulate: int) -> Calls:
    """The calls of a step whose devices all run the whole model.

    Args:
        model: The model; one without blocks has none to call.
        accumulate: Microbatches, one after the other.
    """
    blocks = model.num_blocks if isinstance(model, BlockModel) else 0
    return Calls(
        embed=accumulate,
        embed_backward=accumulate,
        block=blocks * accumulate,
        block_again=0,
        block_backward=blocks * accumulate,
        block_weight=blocks * accumulate,
        head=accumulate,
        rows=blocks,
        outer_gradients={},
        others=accumulate,
    )


def pipeline_calls(model: BlockModel, timetable: Timetable, accumulate: int) -> Calls:
    """The calls of a step in a pipeline.

    Args:
        model: The model.
        timetable: The pipeline's.
        accumulate: How many times a step runs the timetable.
    """
    turns = {part: turns * accumulate for part, turns in most_turns(timetable).items()}
    outer = {}
    for reads, part in ((model.embed_reads, "embed_backward"), (model.head_reads, "head_backward")):
        for name in reads:
            outer[name] = outer.get(name, 0) + turns[part]
    return Calls(
        embed=turns["embed"],
        embed_backward=turns["embed_backward"],
        block=turns["forward"],
        block_again=turns["recompute"],
        block_backward=turns["backward_input"],
        block_weight=turns["backward_weight"],
        head=turns["head_backward"],
        rows=timetable.stored_blocks,
        outer_gradients=outer,
        others=accumulate,
    )
