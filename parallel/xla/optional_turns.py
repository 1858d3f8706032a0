"""Skips a part of a tick on the pipeline stages that do not run it: with a zero-iteration loop, or a conditional.

    simulated devices    a loop with a data-dependent number of turns, 0 on stages that skip the part
    other platforms      a conditional, around a loop with a known number of turns if a part has several; if stages have
                         unequal numbers of blocks, the same loop as on simulated devices

XLA:CPU copies every buffer that passes through a conditional, in each branch, but updates the buffers of a loop's carry
in place. On a GPU, such a conditional copies nothing, but for a loop of unknown length the host waits on every turn.
Unequal stages accept these waits: a conditional for each block would copy the gradients of the stage, 36 s in a step of
Llama-3 405B on pipe 8 x fsdp 8 x context 2 x tensor 8 (compiled for H100s, simulated).

The compiler does not know the number of runs of either, so a name scope records it for `census.py`. The loop over the
blocks of a mixture's experts records the number that it expects in the same way (`blocks/grouped_experts.py`).
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from .platform import by_platform

EXCHANGE = "exchange"
"""The name of the part that ends a tick: each branch is an exchange of messages."""
_PART = re.compile(r"\b(\w+)\.turns_[\d_]+_of_\d+/(?:cond|branch\w*|while)\"")

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
        with jax.named_scope(turns_scope(part, [turns.total], turns.ticks)):
            return lax.fori_loop(0, now, run, carry)

    def in_conditional(now: Array, carry: Carry) -> Carry:
        with jax.named_scope(turns_scope(part, [turns.total // turns.max], turns.ticks)):
            return lax.cond(now > 0, lambda carry: all_turns(jnp.zeros_like(now), carry), _skip, carry)

    def all_turns(first: Array, carry: Carry) -> Carry:
        if turns.max == 1:
            return run(first, carry)
        return lax.fori_loop(0, turns.max, lambda index, carry: run(first + index, carry), carry)

    return by_platform("loops", in_loop, in_conditional if turns.even else in_loop, turns.now, carry)


def _skip(carry: Carry) -> Carry:
    """Returns a carry unchanged. Writes an element of each array to where it is: then XLA updates it in place.

    XLA for GPUs copies an array that a branch returns untouched, in all branches and around them. The buffers of
    Llama-3 8B on pipe 4 x fsdp 8 x tensor 4 (8,192 positions x 1 row) took 5 ms for each tick, of 21 ms for a forward
    (compiled for H100s, not run).
    """

    def touch(leaf: Array) -> Array:
        first = (0,) * leaf.ndim
        return lax.dynamic_update_slice(leaf, lax.slice(leaf, first, (1,) * leaf.ndim), first) if leaf.size else leaf

    return jax.tree.map(touch, carry)


def turns_scope(part: str, times: Iterable[int], of: int = 1) -> str:
    """Returns the name scope of something that runs in some out of `of` turns; `census.calls_of` reads it.

    Args:
        part: Its name; empty if it is not a part of a tick.
        times: How often it runs; of a switch, how often each branch runs.
        of: How often the computation around it runs.
    """
    return f"{part and part + '.'}turns_{'_'.join(map(str, times))}_of_{of}"


def part_of(instruction: str) -> str | None:
    """Returns the part of a tick that a conditional or a loop of a compiled program is; None for any other one.

    Args:
        instruction: The text of the instruction.
    """
    found = _PART.search(instruction)
    return found[1] if found else None
