"""How a stage of a pipeline skips a part of a tick that is not its turn: a loop of no turns, or a conditional.

    simulated devices    a loop of as many turns as there are now, 0 where it is not this stage's turn
    everywhere else      a conditional, around a loop of a known number of turns where a part has several

XLA:CPU copies a buffer that passes through a conditional, whole, in every branch; one that a loop carries is updated in
place. On a GPU a conditional copies nothing, and a loop of unknown length costs the host a wait in every turn.

No compiler knows how often either runs, so a name scope says it, for `census.py`.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from .platform import by_platform

Carry = TypeVar("Carry")


class Turns(NamedTuple):
    """How often a part of a tick runs.

    Attributes:
        now: int32 scalar, in this tick on this stage: 0, or up to `most`.
        most: In a tick at most.
        even: Whether it is always 0 or `most`.
        total: In all ticks together, on the stage where it runs most.
        ticks: The number of ticks.
    """

    now: Array
    most: int
    even: bool
    total: int
    ticks: int


def run_turns(part: str, turns: Turns, run: Callable[[Array, Carry], Carry], carry: Carry) -> Carry:
    """Runs `carry = run(index, carry)` for each index under `turns.now`.

    Args:
        part: The name of the part.
        turns: How often it runs.
        run: One turn; its result has the types of its carry.
        carry: What the first turn starts from, and the result where there is none.
    """

    def in_loop(now: Array, carry: Carry) -> Carry:
        with jax.named_scope(runs(part, turns.total, turns.ticks)):
            return lax.fori_loop(0, now, run, carry)

    def in_conditional(now: Array, carry: Carry) -> Carry:
        outer = turns.total // turns.most if turns.even else turns.ticks
        with jax.named_scope(runs(part, outer, turns.ticks)):
            return lax.cond(now > 0, lambda carry: known_turns(now, carry), lambda carry: carry, carry)

    def known_turns(now: Array, carry: Carry) -> Carry:
        if turns.most == 1:
            return run(jnp.zeros_like(now), carry)
        return lax.fori_loop(0, turns.most, lambda index, carry: one_turn(now, index, carry), carry)

    def one_turn(now: Array, index: Array, carry: Carry) -> Carry:
        index = jnp.zeros_like(now) + index
        if turns.even:
            return run(index, carry)
        with jax.named_scope(runs(part, turns.total, turns.ticks * turns.most)):
            return lax.cond(index < now, lambda carry: run(index, carry), lambda carry: carry, carry)

    return by_platform("loops", in_loop, in_conditional, turns.now, carry)


def runs(part: str, times: int, of: int) -> str:
    """The name scope of something that runs so many times of so many; `compiled_text.calls_of` reads it."""
    return f"{part}.turns_{times}_of_{of}"
