"""One tick of a pipeline on one stage: parts that this stage runs or skips, strictly one after another."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..schedule.table import Kind
from ..schedule.timetable import Entry, Timetable, most_turns
from ..xla.in_order import after
from ..xla.skip import Turns, run_turns

_Carry = TypeVar("_Carry")


class Tick:
    """A tick's entry of the timetable, and the order of its parts.

    Parts that depend on nothing of one another might run at the same time. On simulated devices, starved of threads,
    their collectives then meet in different orders, and wait for ever. So each part counts its turns on a clock, and
    the next one starts after what the clock says (`xla/in_order.py`).
    """

    def __init__(self, entry: Entry, timetable: Timetable) -> None:
        """Starts the clock.

        Args:
            entry: Scalars, this stage's.
            timetable: The pipeline's.
        """
        self.entry = entry
        self._ticks, self._totals = len(timetable.entries.kind), most_turns(timetable)
        self._most, self._even = timetable.blocks_per_slot, is_even(timetable)
        self._clock = jnp.zeros((), jnp.int32)

    def does(self, *kinds: Kind) -> Array:
        """1 where the action is of one of these kinds, else 0."""
        return sum(((self.entry.kind == kind).astype(jnp.int32) for kind in kinds), jnp.zeros((), jnp.int32))

    def each_block(self, part: str, does: Array, run: Callable[[Array, _Carry], _Carry], carry: _Carry) -> _Carry:
        """Runs `carry = run(index, carry)` for each block of the chunk if `does` is 1, after all parts before."""
        turns = Turns(does * self.entry.num_blocks, self._most, self._even, self._totals[part], self._ticks)
        return self._run(part, turns, run, carry)

    def once(self, part: str, does: Array, run: Callable[[_Carry], _Carry], carry: _Carry) -> _Carry:
        """Runs `carry = run(carry)` if `does` is 1, after all parts before."""
        turns = Turns(does, 1, True, self._totals[part], self._ticks)
        return self._run(part, turns, lambda _, carry: run(carry), carry)

    def _run(self, part: str, turns: Turns, run: Callable[[Array, _Carry], _Carry], carry: _Carry) -> _Carry:
        def turn(index: Array, both: tuple[_Carry, Array]) -> tuple[_Carry, Array]:
            carry, self._clock = both
            return run(index, carry), self._clock + 1

        turns = turns._replace(now=self.after(turns.now))
        carry, self._clock = run_turns(part, turns, turn, (carry, self.vary(self._clock)))
        return carry

    def after(self, value: Any) -> Any:
        """A value, which is there once all parts before are done.

        Inside a part: one that is there in each turn anew. XLA:CPU takes what no turn changes out of a loop, and would
        run it in every tick of every stage.
        """
        return after(self._clock, value, integers=True)

    def take(self, buffers: Any, slot: Array) -> Any:
        """One slot of each buffer. No turn takes another than a single slot, as XLA knows: that is read `after`."""
        values = take(buffers, slot)
        is_single = all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(buffers))
        return self.after(values) if is_single else values

    def vary(self, clock: Array) -> Array:
        """The clock, typed as the entry is: different on each stage."""
        return clock + jnp.zeros_like(self.entry.kind)


def is_even(timetable: Timetable) -> bool:
    """Whether all chunks have as many blocks as the largest."""
    entry = timetable.entries
    return bool((entry.num_blocks[entry.kind != Kind.IDLE] == timetable.blocks_per_slot).all())


def choose(flag: Array, yes: Any, no: Any) -> Any:
    """The first of two trees where the flag is true."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), yes, no)


def add(sums: Any, new: Any) -> Any:
    """The sum of two trees."""
    return jax.tree.map(jnp.add, sums, new)


def take(buffers: Any, slot: Array) -> Any:
    """One slot of each buffer of a tree; slots are on dim 0."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, slot, 0, keepdims=False), buffers)


def put(buffers: Any, slot: Array, values: Any) -> Any:
    """Buffers with one slot of each replaced."""
    return jax.tree.map(lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value, slot, 0), buffers, values)
