"""The executor of a pipeline: one loop over the ticks of a timetable, the same program on every stage.

A tick has these parts. Each is a loop whose number of turns the stage's own entry of the timetable gives, 0 where the
part is not this stage's turn:

    embed              1 turn      in F or R of the model's first position
    forward            a layer     in F
    recompute          a layer     in R: forward again, for what backward needs (of a single layer, that alone)
    head               1 turn      in B of the last position: forward and backward of the head
    backward_input     a layer     in B
    backward_weight    a layer     in W
    embed's gradient   1 turn      in B of the first position

One message goes through them: a part leaves it as it came, or puts its result there, or zeros where nothing is left to
send. What it is at the end every stage sends to its neighbours, whether or not they need it, and puts what it receives
into its inbox.

Why loops of 0 turns and not one `lax.switch`: XLA copies a buffer that passes through a conditional, whole, in every
branch; one that a loop carries is updated in place. Measured on CPU with a buffer of 16 slots: 14 ms a tick in a
switch, 1.6 ms in loops, and half the memory. Loops also take stages with unequal numbers of layers as they are.

Collectives inside a part (FSDP's, tensor's) run over devices of one stage. All of these read the same entry, take the
same number of turns, and meet.
"""

from typing import Any

from jax import lax

from ..blocks.pieces import Pieces
from ..model import Params
from ..schedule.table import Kind
from ..schedule.timetable import Entry, Timetable
from .message import Fill, Message, exchange
from .stage import Inputs, Stage, State, Sums


def run_gradients(
    pieces: Pieces, timetable: Timetable, inputs: Inputs, *, axes: tuple[str, ...], fill: Fill = None
) -> tuple[Params, Sums]:
    """Runs a timetable of forwards and backwards; inside `shard_map`.

    Args:
        pieces: The model.
        timetable: From a whole schedule.
        inputs: What this device works on.
        axes: The manual axes; parameters vary over all of them.
        fill: What buffers start with and what is sent where nobody needs it; no result depends on it. None: 0, and
            whatever an action leaves.

    Returns:
        Gradients like the parameters, summed over microbatches on this device alone: of the groups outside the blocks,
        each stage has its own part. And this device's share of (sum of the loss, sum of the weights), 0 but on the
        last position's stage.
    """
    stage = Stage(pieces, timetable, inputs, axes, fill)

    def run(state: State, entry: Entry) -> tuple[State, None]:
        tick = stage.tick(entry)
        inbox, residuals, deferred, gradients, sums = state
        message = stage.embed(tick, stage.read(tick, inbox))
        if timetable.recomputes:
            message, _ = stage.forward(tick, Kind.FORWARD, message, ())
            message, residuals = stage.recompute(tick, message, residuals)
        else:
            message, residuals = stage.forward(tick, Kind.FORWARD, message, residuals)
        message, gradients, sums = stage.head_backward(tick, message, gradients, sums)
        message, deferred = stage.backward_input(tick, message, residuals, deferred)
        gradients = stage.backward_weight(tick, residuals, deferred, gradients)
        message, gradients = stage.embed_backward(tick, message, gradients)
        inbox = exchange(timetable, entry, inbox, message, fill)
        return State(inbox, residuals, deferred, gradients, sums), None

    state, _ = lax.scan(run, stage.start(), stage.entries())
    return state.gradients, state.sums


def run_forward(
    pieces: Pieces, timetable: Timetable, inputs: Inputs, *, axes: tuple[str, ...], fill: Fill = None
) -> Sums:
    """Runs a timetable of forwards alone; inside `shard_map`.

    Args:
        pieces: The model.
        timetable: From a schedule of forwards.
        inputs: What this device works on.
        axes: As for `run_gradients`.
        fill: As for `run_gradients`.

    Returns:
        This device's share of (sum of the loss, sum of the weights), 0 but on the last position's stage.
    """
    stage = Stage(pieces, timetable, inputs, axes, fill)

    def run(state: tuple[Message, Sums], entry: Entry) -> tuple[Any, None]:
        tick = stage.tick(entry)
        inbox, sums = state
        message, _ = stage.forward(tick, Kind.FORWARD, stage.embed(tick, stage.read(tick, inbox)), ())
        message, sums = stage.head_forward(tick, message, sums)
        return (exchange(timetable, entry, inbox, message, fill), sums), None

    (_, sums), _ = lax.scan(run, (stage.new_inbox(), stage.no_sums()), stage.entries())
    return sums
