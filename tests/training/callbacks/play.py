"""A run in miniature: the real loop, gate and conductor around a step that only counts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from spmdkit.parallel.step.state import StepMetrics, TrainState
from spmdkit.training.callbacks.conductor import Conductor, Named
from spmdkit.training.callbacks.rate_factor import adjustable
from spmdkit.training.callbacks.run import Run
from spmdkit.training.ending.stopping import Gate
from spmdkit.training.loop import run_steps

OPTIMIZER = adjustable(optax.sgd(1.0))
PARAMS = {"w": jnp.ones(2)}


class Played(NamedTuple):
    """What came of it.

    Attributes:
        step: of the last state.
        records: of logged steps.
        saved: step -> notes.
        said: lines.
        ended: what the conductor has ended with.
        run: as callbacks saw it.
        state: the last.
    """

    step: int
    records: list[dict[str, Any]]
    saved: dict[int, dict[str, Any]]
    said: list[str]
    ended: Any
    run: Run
    state: TrainState


def first_state(step: int = 0) -> TrainState:
    return TrainState(jnp.int32(step), PARAMS, OPTIMIZER.init(PARAMS), np.zeros(2, np.uint32))


def play(
    *callbacks: Any,
    folder: Path = Path("."),
    steps: int = 12,
    start: int = 0,
    losses: Sequence[float] = (),
    every: int = 2,
    saves: Sequence[int] = (),
    notes: Mapping[str, Any] | None = None,
    state: TrainState | None = None,
    step_batch: tuple[int, int] = (0, 0),
) -> Played:
    """Trains; after each `every` steps an evaluation gives the next of `losses`, for the whole run.

    Args:
        callbacks: By name of their class in notes.
        folder: Of the run.
        steps: Of the whole run.
        start: Steps done.
        losses: Of the evaluations after step `every`, twice that, ...; none, nothing is evaluated on.
        every: Steps from one evaluation to the next.
        saves: After which steps to save anyway.
        notes: Of the checkpoint that the run goes on from.
        state: The first; a new one by default.
        step_batch: Rows of a batch, and of an epoch.
    """
    said: list[str] = []
    saved: dict[int, dict[str, Any]] = {}
    records: list[dict[str, Any]] = []
    batch, examples = step_batch
    run = Run(
        folder=folder,
        start=start,
        num_steps=steps,
        batch=batch,
        examples=examples,
        evaluates=bool(losses),
        say=said.append,
        can_scale=True,
    )
    gate = Gate()
    conductor = Conductor(
        [Named(f"{place} ({type(each).__name__})", each) for place, each in enumerate(callbacks)],
        run,
        gate,
        evaluates_at=lambda number: bool(losses) and number % every == 0,
        saves_at=lambda number: number in saves,
        evaluate=lambda number, state: {"eval_loss": losses[min(number // every, len(losses)) - 1]},
        save=lambda number, state, notes: saved.update({number: dict(notes)}),
    )
    conductor.restore(notes or {})

    def step(state, batch):
        _, opt_state = OPTIMIZER.update(PARAMS, state.opt_state, PARAMS)
        metrics = StepMetrics(jnp.float32(int(state.step) + 1), jnp.float32(1), jnp.float32(1))
        return state._replace(step=state.step + 1, opt_state=opt_state), metrics

    def record(progress):
        records.append({"step": progress.step, "loss": progress.loss, **progress.extra})
        conductor.logged(records[-1])

    try:
        state = conductor.begin(state or first_state(start))
        state = run_steps(
            step,  # pyright: ignore
            state,
            [{}] * (steps - start),
            start=start,
            log_every=1,
            on_progress=record,
            pause_at=conductor.pauses_at,
            on_pause=conductor.pause,
            after_pause=conductor.after_pause,
            may_start=conductor.may_start,
        )
        conductor.end(state)
    finally:
        conductor.close()
    return Played(int(state.step), records, saved, said, conductor.ended, run, state)
