"""A schedule in the form that the executor reads: the action and the slots of its values, for each tick and stage.

A schedule is known before compilation, so it is converted here, on the host, to arrays of integers (ticks x stages). A
value that is needed later is stored in a numbered slot of one of three buffers, from the tick that computes it to the
last tick that reads it; then the slot is reused. A buffer has as many slots as are in use at the same time on the stage
that needs most, so memory depends on the schedule's peak and not on the number of microbatches.

    inbox       activations and gradients received from other stages        from arrival to the action that reads them
    residuals   the values that forward keeps for backward                  from F (or R, with recomputation) to W
    deferred    the values that B, the first half of backward, keeps for W  from B to W

`blocks/split_backward.py` finds the residuals and the deferred values of a block.

The inbox has one additional slot, the last, for unread messages: all stages receive at every tick.
"""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .schedule_table import Action, Kind, Schedule
from .stages import Stages

Integers: TypeAlias = Any
"""int32: an array (ticks, stages) on the host; a traced scalar of one tick and stage in the executor."""


class Entry(NamedTuple):
    """The action of one stage in one tick.

    Attributes:
        kind: A `Kind`.
        microbatch: The index of the microbatch.
        stored_block: The index of the chunk's first block among the blocks stored on the stage.
        block: The index of that block in the model.
        num_blocks: The number of blocks in the chunk.
        embeds: 1 if the action starts with the embedding (forward) or ends with it (backward).
        heads: 1 on the model's last virtual stage: a forward continues to the head, a backward starts with it.
        reads: The slot of the inbox with the action's input.
        residuals: The slot of the residuals.
        deferred: The slot of the values that B defers to W.
        from_below: The slot of the inbox for the message from the previous stage at the end of this tick.
        from_above: The slot of the inbox for the message from the next stage.
        from_self: The slot of the inbox for the stage's own result.
        sends: The index in `Timetable.sends`; the same on all stages.
    """

    kind: Integers
    microbatch: Integers
    stored_block: Integers
    block: Integers
    num_blocks: Integers
    embeds: Integers
    heads: Integers
    reads: Integers
    residuals: Integers
    deferred: Integers
    from_below: Integers
    from_above: Integers
    from_self: Integers
    sends: Integers


class Sends(NamedTuple):
    """The stages that exchange a message at the end of a tick, as pairs (from, to).

    Attributes:
        up: The pairs of messages to the next stage.
        down: The pairs of messages to the stage before.
    """

    up: tuple[tuple[int, int], ...]
    down: tuple[tuple[int, int], ...]


class Timetable(NamedTuple):
    """A schedule as integers.

    Attributes:
        entries: The action of each stage at each tick.
        inbox: The number of slots of the inbox, including the last one, for unread messages.
        residuals: The number of slots for residuals, each of `blocks_per_slot` blocks.
        deferred: The number of slots for deferred values, each of `blocks_per_slot` blocks.
        blocks_per_slot: The number of blocks in the largest virtual stage.
        stored_blocks: The number of blocks stored on each stage, for all its chunks.
        microbatches: M, the number of microbatches.
        neighbors: All pairs of neighbors that ever exchange messages.
        sends: The different exchanges at the end of a tick.
        both_ways: Whether activations and gradients both travel in both directions.
        recomputes: Whether forwards are recomputed, so that the first forward does not keep residuals.
    """

    entries: Entry
    inbox: int
    residuals: int
    deferred: int
    blocks_per_slot: int
    stored_blocks: int
    microbatches: int
    neighbors: Sends
    sends: tuple[Sends, ...]
    both_ways: bool
    recomputes: bool


class Pipeline(NamedTuple):
    """A pipeline that is ready for the executor.

    Attributes:
        schedule: The table of actions.
        stages: The blocks of each stage.
        timetable: The schedule in the form that the executor reads.
    """

    schedule: Schedule
    stages: Stages
    timetable: Timetable


def make_timetable(schedule: Schedule, stages: Stages) -> Timetable:
    """Converts a schedule to integers.

    Args:
        schedule: A schedule that passes `check`, or one with only forwards.
        stages: The blocks of each stage.
    """
    shape = (schedule.num_ticks, schedule.stages)
    table = Entry(*(np.zeros(shape, np.int32) for _ in Entry._fields))
    when = {(stage, action): tick for tick, stage, action in schedule.actions()}
    for (stage, action), tick in when.items():
        _describe(table, schedule, stages, stage, action, tick)
    inbox = _place_messages(table, list(_messages(schedule, when)))
    residuals = _place_held(table.residuals, when, (Kind.RECOMPUTE, Kind.FORWARD))
    deferred = _place_held(table.deferred, when, (Kind.BACKWARD_INPUT,))
    sends = _place_sends(table, unread=inbox - 1)
    num, wraps = schedule.stages, schedule.placement == "loop" and schedule.chunks > 1
    up = tuple((stage, (stage + 1) % num) for stage in range(num if wraps else num - 1))
    return Timetable(
        entries=table,
        inbox=inbox,
        residuals=residuals,
        deferred=deferred,
        blocks_per_slot=stages.slots,
        stored_blocks=stages.slots * stages.chunks,
        microbatches=schedule.microbatches,
        neighbors=Sends(up, tuple((target, source) for source, target in up)),
        sends=sends,
        both_ways=schedule.placement == "v",
        recomputes=any(action.kind == Kind.RECOMPUTE for _, action in when),
    )


def _describe(table: Entry, schedule: Schedule, stages: Stages, stage: int, action: Action, tick: int) -> None:
    virtual_stage = schedule.virtual_stage(stage, action.chunk)
    table.kind[tick, stage] = action.kind
    table.microbatch[tick, stage] = action.microbatch
    table.stored_block[tick, stage] = action.chunk * stages.slots
    table.block[tick, stage] = stages.starts[stage][action.chunk]
    table.num_blocks[tick, stage] = stages.counts[stage][action.chunk]
    table.embeds[tick, stage] = virtual_stage == 0 and action.kind != Kind.BACKWARD_WEIGHT
    table.heads[tick, stage] = virtual_stage == schedule.num_virtual_stages - 1


def _messages(
    schedule: Schedule, when: dict[tuple[int, Action], int]
) -> Iterator[tuple[str, tuple[int, int, int], list[int]]]:
    """Yields the messages: activations to the next virtual stage (from the last: to its own backward), dx back.

    Each as the side that it arrives from; its receiver, the tick that sends it and the last that reads it; all readers.
    """
    for (stage, action), sent in when.items():
        here, last = schedule.virtual_stage(stage, action.chunk), schedule.num_virtual_stages - 1
        if action.kind == Kind.FORWARD and here < last:
            target, kinds = here + 1, (Kind.FORWARD, Kind.RECOMPUTE)
        elif action.kind == Kind.FORWARD:
            target, kinds = here, (Kind.BACKWARD_INPUT,)
        elif action.kind == Kind.BACKWARD_INPUT and here > 0:
            target, kinds = here - 1, (Kind.BACKWARD_INPUT,)
        else:
            continue
        receiver, chunk = schedule.home(target)
        readers = [when.get((receiver, Action(kind, action.microbatch, chunk))) for kind in kinds]
        if ticks := [tick for tick in readers if tick is not None]:
            yield _direction(schedule, action.kind, stage, receiver), (receiver, sent, max(ticks)), ticks


def _direction(schedule: Schedule, kind: Kind, sender: int, receiver: int) -> str:
    """Returns the side that a message arrives from; in a loop, activations only go up and gradients only down."""
    if sender == receiver:
        return "from_self"
    up = receiver > sender if schedule.placement == "v" else kind == Kind.FORWARD
    return "from_below" if up else "from_above"


def _place_messages(table: Entry, messages: list[tuple[str, tuple[int, int, int], list[int]]]) -> int:
    """Assigns slots of the inbox to messages, writes both ends to the table, and returns the number of slots."""
    slots = allocate(life for _, life, _ in messages)
    count = max(slots, default=-1) + 1
    for array in (table.reads, table.from_below, table.from_above, table.from_self):
        array[...] = count
    for (side, (receiver, sent, _), ticks), slot in zip(messages, slots, strict=True):
        table.reads[ticks, receiver] = slot
        getattr(table, side)[sent, receiver] = slot
    return count + 1


def _place_sends(table: Entry, unread: int) -> tuple[Sends, ...]:
    """Writes the index of each tick's exchange into the table, and returns the different exchanges."""
    num, found = table.kind.shape[1], dict[Sends, int]()
    for tick, (from_below, from_above) in enumerate(zip(table.from_below, table.from_above, strict=True)):
        up, down = (np.flatnonzero(slots != unread).tolist() for slots in (from_below, from_above))
        sends = Sends(tuple(((to - 1) % num, to) for to in up), tuple(((to + 1) % num, to) for to in down))
        table.sends[tick] = found.setdefault(sends, len(found))
    return tuple(found)


def _place_held(slots_of: np.ndarray, when: dict[tuple[int, Action], int], makers: tuple[Kind, ...]) -> int:
    """Assigns slots to the values that one action keeps for the actions up to W, and returns the number of slots.

    Args:
        slots_of: The output, the slots by tick and stage: (ticks, stages).
        when: (stage, action) -> tick.
        makers: The kinds that may compute the values; the first one that the schedule has is used.
    """
    held = [(stage, action.microbatch, action.chunk) for stage, action in when if action.kind == Kind.BACKWARD_WEIGHT]
    lives = []
    for stage, microbatch, chunk in held:
        made = [when.get((stage, Action(kind, microbatch, chunk))) for kind in makers]
        start = next(tick for tick in made if tick is not None)
        lives.append((stage, start, when[stage, Action(Kind.BACKWARD_WEIGHT, microbatch, chunk)] + 1))
    slots = allocate(lives)
    for (stage, microbatch, chunk), (_, start, _), slot in zip(held, lives, slots, strict=True):
        for kind in (*makers, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            tick = when.get((stage, Action(kind, microbatch, chunk)))
            if tick is not None and tick >= start:
                slots_of[tick, stage] = slot
    return max(slots, default=0) + 1


def allocate(lives: Iterable[tuple[int, int, int]]) -> list[int]:
    """Assigns each value a slot that no other value of its stage uses during its lifetime.

    Args:
        lives: (stage, start, stop) of each value; a slot can be reused from the tick in which its value stops.

    Returns:
        A slot for each value, from 0. The number of slots is the largest number of values that live at the same time on
        one stage.
    """
    lives = list(lives)
    slots = [0] * len(lives)
    free: dict[int, list[int]] = {}
    busy: dict[int, list[tuple[int, int]]] = {}
    used: dict[int, int] = {}
    for index in sorted(range(len(lives)), key=lambda index: lives[index][1]):
        stage, start, stop = lives[index]
        ends, spare = busy.setdefault(stage, []), free.setdefault(stage, [])
        while ends and ends[0][0] <= start:
            heappush(spare, heappop(ends)[1])
        if not spare:
            heappush(spare, used.setdefault(stage, 0))
            used[stage] += 1
        slots[index] = heappop(spare)
        heappush(ends, (stop, slots[index]))
    return slots


def count_turns(timetable: Timetable) -> dict[str, int]:
    """Counts the turns of each part of a tick over all ticks, on the stage with the most."""
    return {part: int(turns.sum(axis=0).max()) for part, turns in turns_of(timetable).items()}


def turns_of(timetable: Timetable) -> dict[str, np.ndarray]:
    """Returns the turns of each part of a tick, (ticks, stages) int."""
    entry = timetable.entries
    forward, recompute, backward, weight = (
        (entry.kind == kind).astype(int)
        for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    return {
        "embed": entry.embeds * (forward + recompute),
        "forward": entry.num_blocks * forward,
        "recompute": entry.num_blocks * recompute,
        "head_forward": entry.heads * forward,
        "head_backward": entry.heads * backward,
        "backward_input": entry.num_blocks * backward,
        "embed_backward": entry.embeds * backward,
        "backward_weight": entry.num_blocks * weight,
    }
