"""Training from Python with callbacks: the loop, the gate and the conductor put together.

    fitted = fit(step, step.init(0), batches, callbacks=[EarlyStopping()], evaluate=..., evaluate_every=100)

`launch/run/train.py` puts the same pieces together for a config, with the display, the watchdog and a folder.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple

from ...mesh.errors import UserError
from ...parallel.model import Batch
from ...parallel.step.state import TrainState
from ...parallel.step.train_step import Step
from ..checkpointing.checkpoints import Checkpoints
from ..ending.stopping import Gate, stops_on_signals
from ..loop import run_steps
from ..steps.late_log import Progress
from ..watching.replicas import ReplicaCheck
from .catalog import check_callback
from .conductor import Conductor, Named
from .rate_factor import factor_of
from .run import Run


class Fitted(NamedTuple):
    """What came of it.

    Attributes:
        state: the last one.
        steps: optimizer steps done.
        why: why training has ended before the batches did; "" where it has not.
        records: of each logged step its metrics.
    """

    state: TrainState
    steps: int
    why: str
    records: list[dict[str, Any]]


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
        step: From `build_step`; with a callback that changes the learning rate, of an `adjustable` optimizer.
        state: The state before the first batch; it is consumed.
        batches: Global batches, in order.
        callbacks: Objects with methods of `Callback`, in the order in which they are called.
        evaluate: Gives metrics of a state, by name, the same in every process.
        evaluate_every: Steps between two evaluations; 0 = only at the end, and where callbacks ask.
        checkpoints: Where to save; None = nowhere.
        save_every: Steps between two saves; 0 = only at the end, and where callbacks ask.
        folder: Where callbacks keep their files.
        start: Steps done before the first batch; callbacks go on from the notes of that step's checkpoint.
        num_steps: Steps of the whole run, for callbacks; None = `start` and as many as there are batches, which then
            have a length.
        steps_per_epoch: Steps from one epoch to the next; 0 = `examples` says where epochs end, or there are none.
        global_batch: Rows of a batch, over all devices.
        examples: Rows of an epoch, where batches do not divide them; 0 = as `steps_per_epoch` says.
        log_every: Steps between two logged steps.
        say: Prints a line.

    Raises:
        UserError: A callback cannot do its work, or fails; `num_steps` is needed.
        Diverged: The loss is no longer finite.
        ReplicasDiffer: Before a save, devices that hold copies of the same array differ; nothing is saved.
    """
    if num_steps is None:
        if not isinstance(batches, Sized):
            raise UserError("fit: these batches have no length. Give num_steps, the steps of the whole run.")
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
        self._run, self._evaluate, self._checkpoints = run, evaluate, checkpoints
        self._replicas: ReplicaCheck | None = None
        self._conductor = Conductor(
            callbacks,
            run,
            gate,
            evaluates_at=lambda number: evaluate is not None and self._due(number, evaluate_every),
            saves_at=lambda number: checkpoints is not None and self._due(number, save_every),
            evaluate=lambda number, state: evaluate(state) if evaluate else {},
            save=self._save,
        )

    def train(self, step: Step, state: TrainState, batches: Iterable[Batch], log_every: int) -> TrainState:
        """The loop, with the hooks of the conductor."""
        conductor = self._conductor
        if self._run.start and self._checkpoints is not None:
            conductor.restore(self._checkpoints.notes(self._run.start))
        try:
            state = run_steps(
                step,
                conductor.begin(state),
                batches,
                start=self._run.start,
                log_every=log_every,
                on_progress=self._record,
                pause_at=conductor.pauses_at,
                on_pause=conductor.pause,
                after_pause=conductor.after_pause,
                may_start=conductor.may_start,
                on_stop=self._stop,
                on_skip=self._tell_skip,
            )
            if self._checkpoints is not None:
                self._checkpoints.wait()
            conductor.end(state)
        finally:
            conductor.close()
        return state

    def _due(self, number: int, every: int) -> bool:
        return number == self._run.num_steps or (every > 0 and number % every == 0)

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
        """Saves where a signal ends training; where a callback does, its pause has."""
        if not self._conductor.ended.end and number > self._run.start:
            self._conductor.save(number, state)

    def _tell_skip(self, number: int, found: str) -> None:
        """Says that an update was left out: the loss of such a step is scaled."""
        if self._run.is_main:
            self._run.say(f"Step {number}: {found}; its update was left out (loss_scale, which halves).")
