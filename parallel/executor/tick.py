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
from ..schedule.timetable import Entry, Sends, Timetable, count_actions, count_turns
from ..xla.optional_turns import Turns, run_in_conditional, run_in_loop, run_known, turns_scope
from ..xla.ordered_collectives import order_after
from ..xla.platform import TRICKS, by_platform

_Carry = TypeVar("_Carry")
_State = TypeVar("_State", bound=Any)
"""A named tuple with an `inbox`."""


class Tick:
    """The timetable entry of one tick, and the order of its parts.

    Parts that are independent of each other could run at the same time. On simulated devices with few threads, their
    collectives then start in different orders and deadlock. Therefore each part adds its turns to a clock, and the next
    part waits for the clock (`xla/ordered_collectives.py`).
    """

    def __init__(self, entry: Entry, timetable: Timetable, kind: Kind | None = None) -> None:
        """Starts the clock.

        Args:
            entry: The scalars of this stage.
            timetable: The timetable of the pipeline.
            kind: The action, in a branch of its own: the parts of other actions are left out. None if the program
                decides by `entry.kind` whether a part runs.
        """
        self.entry, self.kind = entry, kind
        self._ticks = len(timetable.entries.kind) if kind is None else count_actions(timetable)[kind]
        self._totals = count_turns(timetable)
        self._most, self._even = timetable.blocks_per_slot, is_even(timetable)
        self._clock = jnp.zeros((), jnp.int32)

    def does(self, *kinds: Kind) -> Array:
        """Returns 1 if the action is of one of these kinds, otherwise 0."""
        return sum(((self.entry.kind == kind).astype(jnp.int32) for kind in kinds), jnp.zeros((), jnp.int32))

    def each_block(self, part: str, kind: Kind, run: Callable[[Array, _Carry], _Carry], carry: _Carry) -> _Carry:
        """Runs `carry = run(index, carry)` for each block of the chunk in actions of a kind, after all previous
        parts."""
        turns = Turns(self.entry.num_blocks, self._most, self._even, self._totals[part], self._ticks)
        return self._run(part, (kind,), turns, run, carry, always=self._even)

    def once(
        self, part: str, kinds: tuple[Kind, ...], turns: Array, run: Callable[[_Carry], _Carry], carry: _Carry
    ) -> _Carry:
        """Runs `carry = run(carry)` in actions of these kinds if `turns` is 1, not 0, after all previous parts."""
        once = Turns(turns, 1, True, self._totals[part], self._ticks)
        return self._run(part, kinds, once, lambda _, carry: run(carry), carry)

    def _run(
        self,
        part: str,
        kinds: tuple[Kind, ...],
        turns: Turns,
        run: Callable[[Array, _Carry], _Carry],
        carry: _Carry,
        *,
        always: bool = False,
    ) -> _Carry:
        """Runs the turns of a part; `always` if each action of these kinds has the most turns."""

        def turn(index: Array, both: tuple[_Carry, Array]) -> tuple[_Carry, Array]:
            carry, self._clock = both
            return run(index, carry), self._clock + 1

        if self.kind is not None and self.kind not in kinds:
            return carry
        now = turns.now if self.kind is not None else turns.now * self.does(*kinds)
        turns, both = turns._replace(now=self.wait(now)), (carry, self.vary(self._clock))
        if self.kind is None:
            carry, self._clock = run_in_loop(part, turns, turn, both)
        elif always:
            carry, self._clock = run_known(turns.max, turn, both, like=turns.now)
        else:
            carry, self._clock = run_in_conditional(part, turns, turn, both)
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

    def vary(self, clock: Array) -> Array:
        """Types the clock as varying over the stages, like the entry."""
        return clock + jnp.zeros_like(self.entry.kind)


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


def run_ticks(
    timetable: Timetable, entries: Entry, run: Callable[[Tick, _State], tuple[_State, Message]], state: _State
) -> _State:
    """Runs all ticks of a timetable on one stage; how it skips what is not its turn depends on the platform.

    Args:
        timetable: The timetable of the pipeline.
        entries: This stage's column of the timetable.
        run: `run(tick, state) -> (state, message)`: one tick, until its message is sent.
        state: The initial state, with an `inbox`.
    """

    def in_loops(state: _State, entry: Entry) -> _State:
        state, made = run(Tick(entry, timetable), state)
        return state._replace(inbox=exchange(timetable, entry, state.inbox, made))

    def in_branches(state: _State, entry: Entry) -> _State:
        state, made = run_branch(timetable, entry, run, state)
        return state._replace(inbox=exchange_exactly(timetable, entry, state.inbox, made))

    def tick(state: _State, entry: Entry) -> tuple[_State, None]:
        return by_platform("loops", in_loops, in_branches, state, entry), None

    return lax.scan(tick, state, entries)[0]


def run_branch(
    timetable: Timetable, entry: Entry, run: Callable[[Tick, _State], tuple[_State, Message]], state: _State
) -> tuple[_State, Message]:
    """Runs one tick as one switch over the kinds of actions; the arguments are those of `run_ticks`."""
    counts = count_actions(timetable)

    def branch(kind: Kind, entry: Entry, state: _State) -> tuple[_State, Message]:
        return run(Tick(entry, timetable, kind), state)

    kinds = [kind if counts[kind] else Kind.IDLE for kind in Kind]
    with jax.named_scope(turns_scope("action", counts.values(), len(timetable.entries.kind))):
        return lax.switch(entry.kind, [partial(branch, kind) for kind in kinds], entry, state)


def exchange(timetable: Timetable, entry: Entry, inbox: Message, made: Message) -> Message:
    """Sends a message to both neighbors, and stores the received messages in the slots given by the timetable.

    If an action has nothing to send, its last value is sent too, to a slot that no stage reads.

    Args:
        timetable: The timetable of the pipeline.
        entry: The entry of this stage and tick.
        inbox: The messages received so far, in slots.
        made: The result of the tick's last part.

    Returns:
        The inbox of the next tick.
    """
    return _store(timetable, entry, inbox, made, *_send(timetable.neighbors, timetable, made))


def exchange_exactly(timetable: Timetable, entry: Entry, inbox: Message, made: Message) -> Message:
    """Does the same as `exchange`, but only between the stages whose messages are read, so that no other one waits.

    All stages of a tick run the same branch of a switch, which has these pairs of stages in its permutes.
    """
    ticks = timetable.entries.sends[:, 0].tolist()
    counts = [ticks.count(index) for index in range(len(timetable.sends))]
    branches = [partial(_send, sends, timetable) for sends in timetable.sends]
    with jax.named_scope(turns_scope("exchange", counts, len(ticks))):
        return _store(timetable, entry, inbox, made, *lax.switch(entry.sends, branches, made))


def count_sends(timetable: Timetable, platform: str) -> tuple[int, int]:
    """Returns the number of ticks in which messages are sent to the next stage, and to the one before."""
    ticks = timetable.entries.sends[:, 0]
    if platform in TRICKS["loops"].platforms:
        return len(ticks), len(ticks)
    ups, downs = zip(*((bool(sends.up), bool(sends.down)) for sends in timetable.sends), strict=True)
    return int(np.take(ups, ticks).sum()), int(np.take(downs, ticks).sum())


def _send(sends: Sends, timetable: Timetable, made: Message) -> tuple[Message, Message]:
    """Returns what arrives from the stage before and from the next stage; zeros if nothing does."""

    def permute(message: Message, pairs: tuple[tuple[int, int], ...]) -> Message:
        return lax.ppermute(message, AXIS, pairs) if pairs else zeros_like_message(message)

    from_below = permute(made, sends.up)
    going_down = order_after(from_below, made, integers=True)  # simulated devices mix up simultaneous permutes
    going_down = going_down if timetable.both_ways else going_down._replace(others=[])
    return from_below, permute(going_down, sends.down)


def _store(
    timetable: Timetable, entry: Entry, inbox: Message, made: Message, from_below: Message, from_above: Message
) -> Message:
    """Returns the inbox with the messages of this tick, in the slots given by the timetable."""
    inbox = put(inbox, entry.from_below, from_below)
    others = inbox.others if timetable.both_ways else []
    down = put(inbox._replace(others=others), entry.from_above, from_above)
    inbox = down if timetable.both_ways else inbox._replace(differentiable=down.differentiable)
    return put(inbox, entry.from_self, made)
