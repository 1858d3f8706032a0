"""Training from Python with callbacks: the loop, the gate and the conductor.

    fitted = fit(step, step.init(0), batches, callbacks=[EarlyStopping()], evaluate=..., evaluate_every=100)

A run of a config (`runtime/training_run.py`) uses `run_with_callbacks` too, with guards and a run directory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoints.manager import Checkpoints
from ...checkpoints.replicas import ReplicaCheck
from ...mesh.errors import UserError
from ...parallel.model import Batch
from ...parallel.step.state import TrainState
from ...parallel.step.train_step import Step
from ..loop import is_due, run_steps
from ..steps.late_log import Progress
from ..stopping.gate import stops_on_signals
from .callback import Run
from .callback_catalog import check_callback
from .conductor import Conductor
from .rate_factor import LEARNING_RATE, factors_of


class Fitted(NamedTuple):
    """The result of `fit`.

    Attributes:
        state: The last state.
        steps: Optimizer steps done.
        why: The reason why training ended before the batches did, or "".
        records: The metrics of each logged step.
    """

    state: TrainState
    steps: int
    why: str
    records: list[dict[str, Any]]


def run_with_callbacks(
    conductor: Conductor,
    step: Any,
    state: TrainState,
    batches: Iterable[Batch],
    *,
    finish_saves: Callable[[], None],
    **options: Any,
) -> TrainState:
    """Trains on every batch, with the callbacks of a conductor.

    Args:
        conductor: Calls the callbacks.
        step: The step, or a wrapper of it.
        state: The state before the first batch; it is consumed.
        batches: Global batches, in order.
        finish_saves: Waits for the saves, before callbacks learn of the end.
        options: Further arguments of `run_steps`; they replace those of the conductor.
    """
    hooks = {
        "pause_at": conductor.pauses_at,
        "on_pause": conductor.pause,
        "after_pause": conductor.after_pause,
        "may_start": conductor.may_start,
    }
    try:
        state = run_steps(step, conductor.begin(state), batches, **(hooks | options))
        finish_saves()
        conductor.end(state)
    finally:
        conductor.close()
    return state


def fit(
    step: Step,
    state: TrainState,
    batches: Iterable[Batch],
    *,
    callbacks: Sequence[Any] = (),
    evaluate: Callable[[TrainState], Mapping[str, float]] | None = None,
    evaluate_every: int = 0,
    checkpoints: Checkpoints | None = None,
    save_every: int = 0,
    folder: Path | str = ".",
    start: int = 0,
    num_steps: int | None = None,
    global_batch: int = 1,
    examples: int = 0,
    log_every: int = 10,
    say: Callable[[str], None] = print,
) -> Fitted:
    """Trains on every batch given, or until a callback or a signal ends it.

    Every process of a run calls this, with the same callbacks.

    Args:
        step: From `build_step`; of an `adjustable` optimizer if a callback changes the learning rate.
        state: The state before the first batch; it is consumed.
        batches: Global batches, in order.
        callbacks: Objects with methods of `Callback`, in the order in which they are called.
        evaluate: Returns metrics of a state, by name, the same in every process.
        evaluate_every: Steps between two evaluations; 0 = only at the end, and if callbacks ask.
        checkpoints: Saves the state; None saves nothing.
        save_every: Steps between two saves; 0 = only at the end, and if callbacks ask.
        folder: The directory for the callbacks' files.
        start: Steps done before the first batch; callbacks continue from the notes of that step's checkpoint.
        num_steps: Steps of the whole run, for callbacks; None = `start` plus the number of batches, which must have a
            length.
        global_batch: Rows of a batch, over all devices.
        examples: Rows of an epoch; 0 = there are no epochs.
        log_every: Steps between two logged steps.
        say: Prints a line.

    Raises:
        UserError: A callback cannot work, or fails; or `num_steps` is missing.
        Diverged: The loss is not finite.
        ReplicasDiffer: Before a save, devices that hold copies of the same array differ; nothing is saved.
    """
    if num_steps is None:
        if not isinstance(batches, Sized):
            raise UserError("fit: these batches do not have a length. Give num_steps, the steps of the whole run.")
        num_steps = start + len(batches)
    for callback in callbacks:
        check_callback(callback, f"callbacks: {type(callback).__name__}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    run = Run(
        folder=Path(folder),
        start=start,
        num_steps=num_steps,
        batch=global_batch,
        examples=examples,
        evaluates=evaluate is not None,
        say=say,
        can_scale=LEARNING_RATE in factors_of(state),
    )
    return _fit(run, callbacks, step, state, batches, evaluate, evaluate_every, checkpoints, save_every, log_every)


def _fit(
    run: Run,
    callbacks: Sequence[Any],
    step: Step,
    state: TrainState,
    batches: Iterable[Batch],
    evaluate: Callable[[TrainState], Mapping[str, float]] | None,
    evaluate_every: int,
    checkpoints: Checkpoints | None,
    save_every: int,
    log_every: int,
) -> Fitted:
    replicas, records = ReplicaCheck(state), []

    def save(number: int, state: TrainState, notes: Mapping[str, Any]) -> None:
        if checkpoints is not None:
            replicas.check(number, state)
            checkpoints.save(number, state, run.say, notes=notes, also_keep=run.kept)

    def record(progress: Progress) -> None:
        records.append({**progress._asdict(), **progress.extra})
        del records[-1]["extra"]
        conductor.logged(records[-1])

    def save_at_stop(number: int, state: TrainState) -> None:
        if not conductor.ended.end and number > run.start:  # if a callback ends training, its pause saves
            conductor.save(number, state)

    def report_skip(number: int, found: str) -> None:
        if run.is_main:
            run.say(f"Step {number}: {found}; its update was left out (loss_scale, which halves).")

    with stops_on_signals() as gate:
        conductor = Conductor(
            {f"callbacks.{place} ({type(each).__name__})": each for place, each in enumerate(callbacks)},
            run,
            gate,
            evaluates_at=lambda number: evaluate is not None and is_due(number, evaluate_every, run.num_steps),
            saves_at=lambda number: checkpoints is not None and is_due(number, save_every, run.num_steps),
            evaluate=lambda number, state: evaluate(state) if evaluate else {},
            save=save,
        )
        if run.start and checkpoints is not None:
            conductor.restore(checkpoints.notes(run.start))
        state = run_with_callbacks(
            conductor,
            step,
            state,
            batches,
            finish_saves=checkpoints.wait if checkpoints is not None else lambda: None,
            start=run.start,
            log_every=log_every,
            on_progress=record,
            on_stop=save_at_stop,
            on_skip=report_skip,
        )
    return Fitted(state, run.step, gate.reason, records)
