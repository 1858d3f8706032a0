"""What the stages of a pipeline send to one another at the end of a tick."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..pipeline import AXIS
from ..schedule.table import Kind
from ..schedule.timetable import Entry, Timetable
from ..xla.in_order import after
from .tick import choose, put

Fill: TypeAlias = float | Array | None
"""What is put where nobody reads; for tests."""


class Message(NamedTuple):
    """Activations, or (in `differentiable` alone) their gradient: what a stage receives, works on, and sends on."""

    differentiable: list[Array]
    others: list[Array]


def spent(message: Message) -> Message:
    """What a loop leaves of a message that nobody needs any more: something else, so that the next part waits."""
    return jax.tree.map(jnp.zeros_like, message)


def exchange(timetable: Timetable, entry: Entry, inbox: Message, made: Message, fill: Fill) -> Message:
    """Sends what was made to both neighbours, and puts what arrives where the timetable says.

    What is left of an action that makes nothing for others travels too, to a slot that nobody reads.

    Args:
        timetable: The pipeline's.
        entry: This stage's, of this tick.
        inbox: What arrived before, in slots.
        made: What the tick's last loop left.
        fill: What travels where an action makes nothing for others; None: what is left of it.

    Returns:
        The inbox of the next tick.
    """
    if fill is not None:
        sends = (entry.kind == Kind.FORWARD) | (entry.kind == Kind.BACKWARD_INPUT)
        differentiable = [jnp.full_like(leaf, fill) for leaf in made.differentiable]
        made = choose(sends, made, made._replace(differentiable=differentiable))
    from_below = lax.ppermute(made, AXIS, timetable.up)
    going_down = after(from_below, made, integers=True)  # simulated devices would confuse two permutes at a time
    going_down = going_down if timetable.both_ways else going_down._replace(others=[])
    from_above = lax.ppermute(going_down, AXIS, timetable.down)
    inbox = put(inbox, entry.from_below, from_below)
    others = inbox.others if timetable.both_ways else []
    down = put(inbox._replace(others=others), entry.from_above, from_above)
    inbox = down if timetable.both_ways else inbox._replace(differentiable=down.differentiable)
    return put(inbox, entry.from_self, made)
