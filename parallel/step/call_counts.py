"""How often one step runs each part of a model on a device: what turns the traffic of a part into that of a step."""

from ..collectives import CallCounts
from ..model import BlockModel, Model
from ..schedule.timetable import Timetable, most_turns


def plain_counts(model: Model | BlockModel, accumulate: int) -> CallCounts:
    """The calls of a step whose devices all run the whole model.

    Args:
        model: The model; one without blocks has none to call.
        accumulate: Microbatches, one after the other.
    """
    blocks = model.num_blocks if isinstance(model, BlockModel) else 0
    return CallCounts(
        embed=accumulate,
        embed_backward=accumulate,
        block=blocks * accumulate,
        block_again=0,
        block_backward=blocks * accumulate,
        block_weight=blocks * accumulate,
        head=accumulate,
        rows=blocks,
        group_gradients={},
        others=accumulate,
    )


def pipeline_counts(model: BlockModel, timetable: Timetable, accumulate: int) -> CallCounts:
    """The calls of a step in a pipeline.

    Args:
        model: The model.
        timetable: The pipeline's.
        accumulate: How many times a step runs the timetable.
    """
    turns = {part: turns * accumulate for part, turns in most_turns(timetable).items()}
    groups = {}
    for reads, part in ((model.embed_reads, "embed_backward"), (model.head_reads, "head_backward")):
        for name in reads:
            groups[name] = groups.get(name, 0) + turns[part]
    return CallCounts(
        embed=turns["embed"],
        embed_backward=turns["embed_backward"],
        block=turns["forward"],
        block_again=turns["recompute"],
        block_backward=turns["backward_input"],
        block_weight=turns["backward_weight"],
        head=turns["head_backward"],
        rows=timetable.stored_blocks,
        group_gradients=groups,
        others=accumulate,
    )
