"""Skips a part of a tick on the pipeline stages that do not run it: with a zero-iteration loop, or a conditional.

    simulated devices    a loop with a data-dependent number of turns, 0 on stages that skip the part
    other platforms      a conditional, around a loop with a known number of turns if a part has several

XLA:CPU copies every buffer that passes through a conditional, in each branch, but updates the buffers of a loop's carry
in place. On a GPU, a conditional copies nothing, but for a loop of unknown length the host waits on every turn.

The compiler does not know the number of runs of either, so a name scope records it for `census.py`.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from .platform import by_platform

Carry = TypeVar("Carry")


class Turns(NamedTuple):
    """The number of turns of one part of a tick.

    Attributes:
        now: The turns in this tick on this stage, an int32 scalar: 0 .. `max`.
        max: The largest number of turns in a tick.
        even: Whether `now` is always 0 or `max`.
        total: The turns in all ticks, on the stage with the most.
        ticks: The number of ticks.
    """

    now: Array
    max: int
    even: bool
    total: int
    ticks: int


def run_turns(part: str, turns: Turns, run: Callable[[Array, Carry], Carry], carry: Carry) -> Carry:
    """Runs `carry = run(index, carry)` for each index below `turns.now`.

    Args:
        part: The name of the part.
        turns: The number of turns.
        run: One turn; its result has the types of its carry.
        carry: The initial carry, which is the result without turns.
    """

    def in_loop(now: Array, carry: Carry) -> Carry:
        with jax.named_scope(turns_scope(part, turns.total, turns.ticks)):
            return lax.fori_loop(0, now, run, carry)

    def in_conditional(now: Array, carry: Carry) -> Carry:
        outer = turns.total // turns.max if turns.even else turns.ticks
        with jax.named_scope(turns_scope(part, outer, turns.ticks)):
            return lax.cond(now > 0, lambda carry: known_turns(now, carry), lambda carry: carry, carry)

    def known_turns(now: Array, carry: Carry) -> Carry:
        if turns.max == 1:
            return run(jnp.zeros_like(now), carry)
        return lax.fori_loop(0, turns.max, lambda index, carry: one_turn(now, index, carry), carry)

    def one_turn(now: Array, index: Array, carry: Carry) -> Carry:
        index = jnp.zeros_like(now) + index
        if turns.even:
            return run(index, carry)
        with jax.named_scope(turns_scope(part, turns.total, turns.ticks * turns.max)):
            return lax.cond(index < now, lambda carry: run(index, carry), lambda carry: carry, carry)

    return by_platform("loops", in_loop, in_conditional, turns.now, carry)


def turns_scope(part: str, times: int, of: int) -> str:
    """Returns the name scope of something that runs `times` out of `of` times; `census.calls_of` reads it."""
    return f"{part}.turns_{times}_of_{of}"
