"""One tick of a pipeline on one stage: parts that run strictly one after another, and the messages between stages."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..pipeline import AXIS
from ..schedule.schedule_table import Kind
from ..schedule.timetable import Entry, Sends, Timetable, count_turns
from ..xla.optional_turns import EXCHANGE, Turns, run_turns, turns_scope
from ..xla.ordered_collectives import order_after
from ..xla.platform import by_platform, uses

_Carry = TypeVar("_Carry")


class Tick:
    """The timetable entry of one tick, and the order of its parts.

    Parts that are independent of each other could run at the same time. On simulated devices with few threads, their
    collectives then start in different orders and deadlock. Therefore each part adds its turns to a clock, and the next
    part waits for the clock (`xla/ordered_collectives.py`).
    """

    def __init__(self, entry: Entry, timetable: Timetable) -> None:
        """Starts the clock.

        Args:
            entry: The scalars of this stage.
            timetable: The timetable of the pipeline.
        """
        self.entry = entry
        self._ticks, self._totals = len(timetable.entries.kind), count_turns(timetable)
        self._most, self._even = timetable.blocks_per_slot, is_even(timetable)
        self._clock = jnp.zeros((), jnp.int32)

    def does(self, *kinds: Kind) -> Array:
        """Returns 1 if the action is of one of these kinds, otherwise 0."""
        return sum(((self.entry.kind == kind).astype(jnp.int32) for kind in kinds), jnp.zeros((), jnp.int32))

    def each_block(self, part: str, does: Array, run: Callable[[Array, _Carry], _Carry], carry: _Carry) -> _Carry:
        """Runs `carry = run(index, carry)` for each block of the chunk if `does` is 1, after all previous parts."""
        turns = Turns(does * self.entry.num_blocks, self._most, self._even, self._totals[part], self._ticks)
        return self._run(part, turns, run, carry)

    def once(self, part: str, does: Array, run: Callable[[_Carry], _Carry], carry: _Carry) -> _Carry:
        """Runs `carry = run(carry)` if `does` is 1, after all previous parts."""
        turns = Turns(does, 1, True, self._totals[part], self._ticks)
        return self._run(part, turns, lambda _, carry: run(carry), carry)

    def _run(self, part: str, turns: Turns, run: Callable[[Array, _Carry], _Carry], carry: _Carry) -> _Carry:
        def turn(index: Array, both: tuple[_Carry, Array]) -> tuple[_Carry, Array]:
            carry, self._clock = both
            return run(index, carry), self._clock + 1

        turns = turns._replace(now=self.wait(turns.now))
        clock = self._clock + jnp.zeros_like(self.entry.kind)  # varying over the stages, like the entry
        carry, self._clock = run_turns(part, turns, turn, (carry, clock))
        return carry

    def wait(self, value: Any) -> Any:
        """Returns the value once all previous parts are done.

        Inside a part, the value depends on the turn. Otherwise XLA:CPU would move loop-invariant code out of the loop,
        and run it in every tick of every stage.
        """
        return order_after(self._clock, value, integers=True)

    def take(self, buffers: Any, slot: Array) -> Any:
        """Returns one slot of each buffer. If there is a single slot, reading it is loop-invariant, so it waits."""
        values = take(buffers, slot)
        is_single = all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(buffers))
        return self.wait(values) if is_single else values


def is_even(timetable: Timetable) -> bool:
    """Returns whether all chunks have the same number of blocks."""
    entry = timetable.entries
    return bool((entry.num_blocks[entry.kind != Kind.IDLE] == timetable.blocks_per_slot).all())


def add(sums: Any, new: Any) -> Any:
    """Adds two trees."""
    return jax.tree.map(jnp.add, sums, new)


def take(buffers: Any, slot: Array) -> Any:
    """Reads one slot of each buffer in a tree; dim 0 counts the slots."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False), buffers)


def put(buffers: Any, slot: Array, values: Any) -> Any:
    """Writes one slot of each buffer in a tree."""
    return jax.tree.map(lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value, slot, 0), buffers, values)


class Message(NamedTuple):
    """Activations, or (in `differentiable`) their gradient, that a stage receives, transforms and sends."""

    differentiable: list[Array]
    others: list[Array]


def zeros_like_message(message: Message) -> Message:
    """Returns the result of a loop whose message is no longer needed: a new value, so that the next part waits."""
    return jax.tree.map(jnp.zeros_like, message)


def exchange(timetable: Timetable, entry: Entry, inbox: Message, made: Message) -> Message:
    """Sends the message of a tick to the neighbors, and stores what arrives in the slots given by the timetable.

    On simulated devices each stage exchanges messages with both neighbors in every tick, and stores what it does not
    need in a slot that no action reads. Elsewhere a stage sends only what is read, and waits for no other stage: all
    stages run the same branch of a switch, which has the pairs of this tick in its permutes. For 1f1b on 4 stages with
    32 microbatches, in which a backward to the input takes twice as long as a forward, that is 137 times the forward
    instead of 203 (`schedule/timing.py`).

    Args:
        timetable: The timetable of the pipeline.
        entry: The entry of this stage and tick.
        inbox: The messages received so far, in slots.
        made: The result of the tick's last part.

    Returns:
        The inbox of the next tick.
    """

    def with_all(made: Message, _: Array) -> tuple[Message, Message]:
        return _send(timetable.neighbors, timetable, made)

    def with_some(made: Message, index: Array) -> tuple[Message, Message]:
        ticks = timetable.entries.sends[:, 0].tolist()
        counts = [ticks.count(each) for each in range(len(timetable.sends))]
        branches = [partial(_send, sends, timetable) for sends in timetable.sends]
        with jax.named_scope(turns_scope(EXCHANGE, counts, len(ticks))):
            return lax.switch(index, branches, made)

    from_below, from_above = by_platform("loops", with_all, with_some, made, entry.sends)
    inbox = put(inbox, entry.from_below, from_below)
    others = inbox.others if timetable.both_ways else []
    down = put(inbox._replace(others=others), entry.from_above, from_above)
    inbox = down if timetable.both_ways else inbox._replace(differentiable=down.differentiable)
    return put(inbox, entry.from_self, made)


def _send(sends: Sends, timetable: Timetable, made: Message) -> tuple[Message, Message]:
    """Returns what arrives from the stage before and from the next stage; zeros if nothing does."""

    def permute(message: Message, pairs: tuple[tuple[int, int], ...]) -> Message:
        return lax.ppermute(message, AXIS, pairs) if pairs else zeros_like_message(message)

    from_below = permute(made, sends.up)
    going_down = order_after(from_below, made, integers=True)  # simulated devices mix up simultaneous permutes
    going_down = going_down if timetable.both_ways else going_down._replace(others=[])
    return from_below, permute(going_down, sends.down)


def count_sends(timetable: Timetable, platform: str) -> tuple[int, int]:
    """Returns the number of ticks in which messages are sent to the next stage, and to the one before."""
    ticks = timetable.entries.sends[:, 0]
    if uses("loops", platform):
        return len(ticks), len(ticks)
    ups, downs = zip(*((bool(sends.up), bool(sends.down)) for sends in timetable.sends), strict=True)
    return int(np.take(ups, ticks).sum()), int(np.take(downs, ticks).sum())
