"""The executor of a pipeline: one loop over the ticks of a timetable, the same program on every stage.

A tick has these parts. A stage runs a part as often as its own entry of the timetable says, and skips it where it is
not its turn:

    embed              once        in F or R of the first virtual stage
    forward            a block     in F
    recompute          a block     in R: the residuals of forward once more (of a single block, these alone)
    head               once        in B of the last virtual stage: forward and backward of the head
    backward_input     a block     in B
    backward_weight    a block     in W
    embed's gradient   once        in B of the first virtual stage

One message goes through them. A part leaves it as it came, or puts its result there, or zeros where nothing is left to
send. At the end of the tick every stage sends it to both neighbours, whether or not they need it, and puts what it
receives into its inbox.

How a stage skips a part depends on the platform: `xla/skip.py`. Either way stages with unequal numbers of blocks run as
they are.

Collectives inside a part (FSDP's, tensor's) run over devices of one stage. All of these read the same entry, take the
same number of turns, and meet.
"""

from typing import Any

from jax import lax

from ..blocks.model_parts import ModelParts
from ..model import Params
from ..model.loss_sums import LossSums
from ..schedule.table import Kind
from ..schedule.timetable import Entry, Timetable
from .message import Fill, Message, exchange
from .stage import Inputs, Stage, State


def run_gradients(
    parts: ModelParts, timetable: Timetable, inputs: Inputs, *, axes: tuple[str, ...], fill: Fill = None
) -> tuple[Params, LossSums]:
    """Runs a timetable of forwards and backwards; inside `shard_map`.

    Args:
        parts: The model.
        timetable: From a whole schedule.
        inputs: What this device works on.
        axes: The manual axes; parameters vary over all of them.
        fill: What buffers start with and what is sent where nobody needs it; no result depends on it. None: 0, and
            whatever an action leaves.

    Returns:
        Gradients like the parameters, summed over microbatches on this device alone: of the groups outside the blocks,
        each stage has its own part. And this device's share of the sums, 0 but on the stage that runs the head.
    """
    stage = Stage(parts, timetable, inputs, axes, fill)

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
    parts: ModelParts, timetable: Timetable, inputs: Inputs, *, axes: tuple[str, ...], fill: Fill = None
) -> LossSums:
    """Runs a timetable of forwards alone; inside `shard_map`.

    Args:
        parts: The model.
        timetable: From a schedule of forwards.
        inputs: What this device works on.
        axes: As for `run_gradients`.
        fill: As for `run_gradients`.

    Returns:
        This device's share of the sums, 0 but on the stage that runs the head.
    """
    stage = Stage(parts, timetable, inputs, axes, fill)

    def run(state: tuple[Message, LossSums], entry: Entry) -> tuple[Any, None]:
        tick = stage.tick(entry)
        inbox, sums = state
        message, _ = stage.forward(tick, Kind.FORWARD, stage.embed(tick, stage.read(tick, inbox)), ())
        message, sums = stage.head_forward(tick, message, sums)
        return (exchange(timetable, entry, inbox, message, fill), sums), None

    (_, sums), _ = lax.scan(run, (stage.new_inbox(), stage.no_sums()), stage.entries())
    return sums
