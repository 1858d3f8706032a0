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
from ..stopping.gate import Gate, stops_on_signals
from .callback import Run
from .callback_catalog import check_callback
from .conductor import Conductor, Named
from .rate_factor import factor_of


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
    on_pause: Callable[[int, TrainState], dict[str, float]] | None = None,
    after_pause: Callable[[int, TrainState], TrainState | None] | None = None,
    **options: Any,
) -> TrainState:
    """Trains on every batch, with the callbacks of a conductor.

    Args:
        conductor: Calls the callbacks.
        step: The step, or a wrapper of it.
        state: The state before the first batch; it is consumed.
        batches: Global batches, in order.
        finish_saves: Waits for the saves, before callbacks learn of the end.
        on_pause: Replaces the conductor's own method.
        after_pause: Replaces the conductor's own method.
        options: Further arguments of `run_steps`.
    """
    try:
        state = run_steps(
            step,
            conductor.begin(state),
            batches,
            pause_at=conductor.pauses_at,
            on_pause=on_pause or conductor.pause,
            after_pause=after_pause or conductor.after_pause,
            may_start=conductor.may_start,
            **options,
        )
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
    steps_per_epoch: int = 0,
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
        steps_per_epoch: Steps of an epoch; 0 = `examples` defines epochs, or there are none.
        global_batch: Rows of a batch, over all devices.
        examples: Rows of an epoch, if batches do not divide it; 0 = as `steps_per_epoch` defines.
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
        examples=examples or steps_per_epoch * global_batch,
        evaluates=evaluate is not None,
        say=say,
        can_scale=factor_of(state) is not None,
    )
    named = [Named(f"callbacks.{place} ({type(each).__name__})", each) for place, each in enumerate(callbacks)]
    with stops_on_signals() as gate:
        fitting = _Fitting(run, gate, named, evaluate, evaluate_every, checkpoints, save_every)
        state = fitting.train(step, state, batches, log_every)
    return Fitted(state, run.step, gate.reason, fitting.records)


class _Fitting:
    """One call of `fit`."""

    def __init__(
        self,
        run: Run,
        gate: Gate,
        callbacks: Sequence[Named],
        evaluate: Callable[[TrainState], Mapping[str, float]] | None,
        evaluate_every: int,
        checkpoints: Checkpoints | None,
        save_every: int,
    ) -> None:
        self.records: list[dict[str, Any]] = []
        self._run, self._checkpoints = run, checkpoints
        self._replicas: ReplicaCheck | None = None
        last = run.num_steps
        self._conductor = Conductor(
            callbacks,
            run,
            gate,
            evaluates_at=lambda number: evaluate is not None and is_due(number, evaluate_every, last),
            saves_at=lambda number: checkpoints is not None and is_due(number, save_every, last),
            evaluate=lambda number, state: evaluate(state) if evaluate else {},
            save=self._save,
        )

    def train(self, step: Step, state: TrainState, batches: Iterable[Batch], log_every: int) -> TrainState:
        """Trains on every batch."""
        if self._run.start and self._checkpoints is not None:
            self._conductor.restore(self._checkpoints.notes(self._run.start))
        return run_with_callbacks(
            self._conductor,
            step,
            state,
            batches,
            finish_saves=self._checkpoints.wait if self._checkpoints is not None else lambda: None,
            start=self._run.start,
            log_every=log_every,
            on_progress=self._record,
            on_stop=self._stop,
            on_skip=self._report_skip,
        )

    def _save(self, number: int, state: TrainState, notes: Mapping[str, Any]) -> None:
        if self._checkpoints is not None:
            self._replicas = self._replicas or ReplicaCheck(state)
            self._replicas.check(number, state)
            self._checkpoints.save(number, state, self._run.say, notes=notes, also_keep=self._run.kept)

    def _record(self, progress: Progress) -> None:
        record = {**progress._asdict(), **progress.extra}
        del record["extra"]
        self.records.append(record)
        self._conductor.logged(record)

    def _stop(self, number: int, state: TrainState) -> None:
        """Saves after a signal; if a callback ends training, its pause saves."""
        if not self._conductor.ended.end and number > self._run.start:
            self._conductor.save(number, state)

    def _report_skip(self, number: int, found: str) -> None:
        if self._run.is_main:
            self._run.say(f"Step {number}: {found}; its update was left out (loss_scale, which halves).")
