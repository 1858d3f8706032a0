"""One tick of a pipeline on one stage: loops that this stage runs or not, strictly one after another."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..schedule.table import Kind
from ..schedule.timetable import Entry

_Carry = TypeVar("_Carry")


class Tick:
    """A tick's entry of the timetable, and the order of its loops.

    Loops that depend on nothing of one another might run at the same time. On simulated devices, starved of threads,
    their collectives then meet in different orders, and wait for ever. So each loop counts its turns on a clock, and
    the next one starts from what the clock says.
    """

    def __init__(self, entry: Entry, most_turns: Mapping[str, int], ticks: int) -> None:
        """Starts the clock.

        Args:
            entry: Scalars, this stage's.
            most_turns: Turns of each loop in all ticks, see `timetable.most_turns`.
            ticks: The number of ticks.
        """
        self.entry = entry
        self._most_turns, self._ticks = most_turns, ticks
        self._clock = jnp.zeros((), jnp.int32)

    def does(self, *kinds: Kind) -> Array:
        """1 where the action is of one of these kinds, else 0."""
        return sum(((self.entry.kind == kind).astype(jnp.int32) for kind in kinds), jnp.zeros((), jnp.int32))

    def loop(self, part: str, turns: Array, run: Callable[[Array, _Carry], _Carry], carry: _Carry) -> _Carry:
        """Runs `carry = run(index, carry)` for each index under `turns`, after all loops before.

        XLA cannot know how often: the name scope says it, for `xla/census.py`.
        """

        def turn(index: Array, both: tuple[_Carry, Array]) -> tuple[_Carry, Array]:
            carry, self._clock = both
            return run(index, carry), self._clock + 1

        with jax.named_scope(f"{part}.turns_{self._most_turns[part]}_of_{self._ticks}"):
            carry, self._clock = lax.fori_loop(0, self.after(turns), turn, (carry, self.vary(self._clock)))
        return carry

    def once(self, part: str, turns: Array, run: Callable[[_Carry], _Carry], carry: _Carry) -> _Carry:
        """Runs `carry = run(carry)` if `turns` is 1, after all loops before; `executor/run.py` says why not `cond`."""
        return self.loop(part, turns, lambda _, carry: run(carry), carry)

    def after(self, value: Any) -> Any:
        """A value, which is there once all loops before are done.

        Inside a loop: one that is there in each turn anew. XLA takes what no turn changes out of a loop, and would run
        it in every tick of every stage.
        """
        return choose(self._clock >= 0, value, jax.tree.map(jnp.zeros_like, value))

    def take(self, buffers: Any, slot: Array) -> Any:
        """One slot of each buffer. No turn takes another than a single slot, as XLA knows: that is read `after`."""
        values = take(buffers, slot)
        is_single = all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(buffers))
        return self.after(values) if is_single else values

    def vary(self, clock: Array) -> Array:
        """The clock, typed as the entry is: different on each stage."""
        return clock + jnp.zeros_like(self.entry.kind)


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
