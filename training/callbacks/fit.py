"""Training from Python with callbacks: the loop, the gate and the conductor.

    fitted = fit(step, step.init(0), batches, callbacks=[EarlyStopping()], evaluate=..., evaluate_every=100)

A run of a config (`runtime/training_run.py`) uses `run_with_callbacks` too, with guards and a run directory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ...checkpoints.manager import Checkpoints
from ...checkpoints.replicas import ReplicaCheck
from ...mesh.errors import UserError, counted
from ...mesh.files import check_local
from ...parallel.model import Batch
from ...parallel.step.state import TrainState
from ...parallel.step.train_step import Step
from ..display import Display
from ..loop import is_due, run_steps
from ..steps.first_batch import FirstBatch
from ..steps.late_log import Progress
from ..steps.not_finite import Diverged
from ..stopping.gate import Gate, stops_on_signals
from .callback import Run
from .callback_catalog import check_callback
from .conductor import Conductor
from .rate_factor import LEARNING_RATE, factors_of

GIVEN_STATE = (
    "The state that fit got must be the same in all processes: init must draw every number from its key (jax.random), "
    "and given parameters must be those of the same files. If that is not the cause, a device computes wrongly: "
    "spmdkit doctor tests each one."
)


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

    def __repr__(self) -> str:
        if not self.records:
            latest = "nothing logged"
        else:
            latest = f"loss={self.records[-1]['loss']:.4g}, {counted(len(self.records), 'record')}"
        return f"Fitted(steps={self.steps}, why={self.why!r}, {latest})"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a notebook's "interrupt", ended `fit` after a whole step.

    Attributes:
        fitted: The result of `fit` up to that step. Training can continue from `fitted.state`.
    """

    def __init__(self, fitted: Fitted, num_steps: int) -> None:
        """Describes the interruption; `num_steps` are the steps of the whole run."""
        super().__init__(f"Training was interrupted after step {fitted.steps:,} of {num_steps:,}.")
        self.fitted = fitted


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
        "last": conductor.last_step,
    }
    first = FirstBatch(batches)
    try:
        state = run_steps(step, conductor.begin(state), first, **(hooks | options))
        finish_saves()
        conductor.end(state)
    except Diverged as error:
        raise first.explain(error) from error.__cause__
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
    progress: bool = True,
    on_progress: Callable[[Mapping[str, Any]], None] | None = None,
    say: Callable[[str], None] | None = None,
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
        progress: Shows a panel on a terminal and in a notebook, and elsewhere a line for each logged step.
        on_progress: Receives the record of each logged step, by name; see docs/metrics.md.
        say: Prints a line of a callback; by default, beside the progress.

    Raises:
        Interrupted: SIGINT (Ctrl-C) ended training after a whole step, which was saved if there are `checkpoints`.
        UserError: A callback fails, `num_steps` is missing, batches end before it, or processes hold other states.
        Diverged: The loss is not finite.
        ReplicasDiffer: Before a save, devices that hold copies of the same array differ; nothing is saved.
    """
    num_steps = start + _count_batches(batches) if num_steps is None else num_steps
    for callback in callbacks:
        check_callback(callback, f"callbacks: {type(callback).__name__}")
    directory = _make_directory(folder)
    with ExitStack() as stack:
        display = stack.enter_context(Display(num_steps, start, _title(step))) if progress else None
        run = Run(
            folder=directory,
            start=start,
            num_steps=num_steps,
            batch=global_batch,
            examples=examples,
            evaluates=evaluate is not None,
            say=say or (display.message if display is not None else print),
            can_scale=LEARNING_RATE in factors_of(state),
        )
        call = _Call(
            run=run,
            callbacks=callbacks,
            evaluate=evaluate,
            evaluate_every=evaluate_every,
            checkpoints=checkpoints,
            save_every=save_every,
            display=display,
            on_progress=on_progress,
        )
        fitted, signal_name = call.train(step, state, batches, log_every)
    if signal_name.startswith("SIGINT"):
        raise Interrupted(fitted, num_steps)
    return fitted


def _make_directory(folder: Path | str) -> Path:
    check_local(folder, "folder")
    directory = Path(folder)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _count_batches(batches: Iterable[Batch]) -> int:
    if not isinstance(batches, Sized):
        raise UserError("fit: these batches do not have a length. Give num_steps, the steps of the whole run.")
    return len(batches)


def _title(step: Any) -> str:
    """Returns the line above the progress; a wrapper of a step has no plan."""
    return step.plan.title if isinstance(step, Step) else "training"


@dataclass(kw_only=True)
class _Call:
    """One call of `fit`, with its arguments."""

    run: Run
    callbacks: Sequence[Any]
    evaluate: Callable[[TrainState], Mapping[str, float]] | None
    evaluate_every: int
    checkpoints: Checkpoints | None
    save_every: int
    display: Display | None
    on_progress: Callable[[Mapping[str, Any]], None] | None

    def train(self, step: Step, state: TrainState, batches: Iterable[Batch], log_every: int) -> tuple[Fitted, str]:
        """Trains, and returns the result and the signal that ended training, or ""."""
        self._replicas = ReplicaCheck(state)
        self._records: list[dict[str, Any]] = []
        if jax.process_count() > 1 and self.run.start == 0:
            self._replicas.check_start(state, GIVEN_STATE)
        with stops_on_signals() as gate:
            self._conductor = self._make_conductor(gate)
            if self.run.start and self.checkpoints is not None:
                self._conductor.restore(self.checkpoints.notes(self.run.start))
            state = run_with_callbacks(
                self._conductor,
                step,
                state,
                batches,
                finish_saves=self._finish_saves,
                start=self.run.start,
                log_every=log_every,
                on_progress=self._record,
                on_stop=self._save_at_stop,
                on_skip=self._report_skip,
            )
        ended_by_callback = bool(self._conductor.ended.end)
        signal_name = "" if ended_by_callback else gate.reason
        return Fitted(state, self.run.step, gate.reason, self._records), signal_name

    def _make_conductor(self, gate: Gate) -> Conductor:
        names = [f"callbacks.{place} ({type(callback).__name__})" for place, callback in enumerate(self.callbacks)]
        return Conductor(
            dict(zip(names, self.callbacks, strict=True)),
            self.run,
            gate,
            evaluates_at=self._evaluates_at,
            saves_at=self._saves_at,
            evaluate=self._evaluate,
            save=self._save,
        )

    def _evaluates_at(self, number: int) -> bool:
        return self.evaluate is not None and is_due(number, self.evaluate_every, self.run.num_steps)

    def _evaluate(self, number: int, state: TrainState) -> Mapping[str, float]:
        return {} if self.evaluate is None else self.evaluate(state)

    def _saves_at(self, number: int) -> bool:
        return self.checkpoints is not None and is_due(number, self.save_every, self.run.num_steps)

    def _save(self, number: int, state: TrainState, notes: Mapping[str, Any]) -> None:
        if self.checkpoints is not None:
            self._replicas.check(number, state)
            self.checkpoints.save(number, state, self.run.say, notes=notes, also_keep=self.run.kept)

    def _save_at_stop(self, number: int, state: TrainState) -> None:
        # If a callback ends training, its pause saves.
        if not self._conductor.ended.end and number > self.run.start:
            self._conductor.save(number, state)

    def _finish_saves(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def _record(self, progress: Progress) -> None:
        record = progress.record()
        self._records.append(record)
        if self.display is not None:
            self.display.update(record)
        if self.on_progress is not None:
            self.on_progress(record)
        self._conductor.logged(record)

    def _report_skip(self, number: int, found: str) -> None:
        if self.run.is_main:
            self.run.say(f"Step {number}: {found}; its update was left out (loss_scale, which halves).")
