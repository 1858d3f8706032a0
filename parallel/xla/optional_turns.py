"""Skips a part of a tick on the pipeline stages that do not run it: with a zero-iteration loop, or a conditional.

    simulated devices    each part is a loop with a data-dependent number of turns, 0 on stages that skip the part
    other platforms      one switch over the actions; inside, loops with a known number of turns, and conditionals

XLA:CPU copies every buffer that passes through a conditional, in each branch; it updates a buffer that a loop carries
in place. On a GPU a conditional copies nothing, and a loop of unknown length makes the host wait on every turn.

The compiler does not know how often either runs, so a name scope records it for `census.py`.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

Carry = TypeVar("Carry")
Run = Callable[[Array, Carry], Carry]


class Turns(NamedTuple):
    """The number of turns of one part of a tick.

    Attributes:
        now: The turns in this tick on this stage, an int32 scalar: 0 .. `max`.
        max: The largest number of turns in a tick.
        even: Whether `now` is always 0 or `max`.
        total: The turns in all ticks, on the stage with the most.
        ticks: The number of ticks that decide about the part.
    """

    now: Array
    max: int
    even: bool
    total: int
    ticks: int


def run_in_loop(part: str, turns: Turns, run: Run[Carry], carry: Carry) -> Carry:
    """Runs `carry = run(index, carry)` for each index below `turns.now`, in a loop of unknown length.

    Args:
        part: The name of the part.
        turns: The number of turns.
        run: One turn; its result has the types of its carry.
        carry: The initial carry, which is the result without turns.
    """
    with jax.named_scope(turns_scope(part, [turns.total], turns.ticks)):
        return lax.fori_loop(0, turns.now, run, carry)


def run_in_conditional(part: str, turns: Turns, run: Run[Carry], carry: Carry) -> Carry:
    """Runs the same as `run_in_loop`, in a conditional around a loop of known length."""

    def one_turn(index: Array, carry: Carry) -> Carry:
        if turns.even:
            return run(index, carry)
        with jax.named_scope(turns_scope(part, [turns.total], turns.ticks * turns.max)):
            return lax.cond(index < turns.now, lambda carry: run(index, carry), lambda carry: carry, carry)

    def all_turns(carry: Carry) -> Carry:
        return run_known(turns.max, one_turn, carry, like=turns.now)

    outer = turns.total // turns.max if turns.even else turns.ticks
    with jax.named_scope(turns_scope(part, [outer], turns.ticks)):
        return lax.cond(turns.now > 0, all_turns, lambda carry: carry, carry)


def run_known(number: int, run: Run[Carry], carry: Carry, *, like: Array) -> Carry:
    """Runs `carry = run(index, carry)` a known number of times; an index has the type of `like`."""
    zero = jnp.zeros_like(like)
    if number == 1:
        return run(zero, carry)
    return lax.fori_loop(0, number, lambda index, carry: run(zero + index, carry), carry)


def turns_scope(part: str, times: Iterable[int], of: int) -> str:
    """Returns the name scope of something that runs in some out of `of` turns; `census.calls_of` reads it.

    Args:
        part: Its name.
        times: How often it runs; of a switch, how often each branch runs.
        of: The turns of the computation around it.
    """
    return f"{part}.turns_{'_'.join(map(str, times))}_of_{of}"
