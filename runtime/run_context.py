"""The context of a run, and the work around its steps: evaluations, saves, callbacks, and logged steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..checkpoints.identity import RUN, Identity
from ..checkpoints.manager import Checkpoints
from ..configs.config_text import as_plain
from ..configs.schema import Config
from ..data.ordering.buckets import BucketedSource
from ..data.ordering.order import batch_number
from ..data.source import Source, Splits
from ..mesh.processes import is_main_process, local_copy
from ..parallel.model import BlockModel, Model, Params
from ..parallel.step.state import TrainState
from ..training.callbacks.callback import Run
from ..training.callbacks.conductor import Conductor
from ..training.display import Display
from ..training.loop import evaluate_sources, is_due, metric_names
from ..training.metrics import MetricsLog
from ..training.optimizing.averaging import average_reader
from ..training.optimizing.learning_rates import is_plateau, make_learning_rate, plateau_scale, rate_reader
from ..training.steps.late_log import Progress
from ..training.stopping.gate import Gate
from .build_run import Built, changes_learning_rate, configured_callbacks
from .finish import sample_text, writes_text
from .guards.guards import Guards
from .model_flops import with_counted_flops
from .ownership import Ownership
from .rollbacks import Rollbacks, data_position


@dataclass(kw_only=True)
class RunContext:
    """The parts of a run that stay the same from its first step to its last, across rollbacks.

    Attributes:
        built: The run.
        folder: The run directory.
        identity: The identity of the run.
        checkpoints: The run's checkpoints.
        display: Shows its steps and messages.
        ownership: The ownership of the directory.
        gate: Lets steps start, in all processes alike.
        guards: Watch the run.
        rollbacks: The rollbacks so far.
    """

    built: Built
    folder: Path
    identity: Identity
    checkpoints: Checkpoints
    display: Display
    ownership: Ownership
    gate: Gate
    guards: Guards
    rollbacks: Rollbacks

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.built.config

    @cached_property
    def counted(self) -> Built:
        """The run, with the operations of its model: those that it states, or those of its traced loss."""
        return self.built._replace(model=with_counted_flops(self.built))

    @cached_property
    def evaluated_params(self) -> Callable[[TrainState], Params]:
        """Returns what evaluations read of a state: the parameters, or their averages (`optimizer.ema.evaluate`)."""
        return average_reader(self.built.layouts) if self.config.optimizer.ema.evaluate else attrgetter("params")


class StepHooks:
    """The work around the steps after a start or a rollback, with new callbacks."""

    def __init__(self, context: RunContext, start: int) -> None:
        """Creates the callbacks, the conductor that calls them, and the recorder.

        Args:
            context: The run.
            start: Steps done.

        Raises:
            UserError: A callback cannot work.
        """
        self._context, self._built, self._config = context, context.built, context.config
        callbacks = configured_callbacks(self._config)
        can_scale, say = changes_learning_rate(callbacks), context.display.message
        self.seen = run_for_callbacks(
            self._built, context.folder, start=start, can_scale=can_scale, say=say, left_out=context.rollbacks.left_out
        )
        self.conductor = Conductor(
            callbacks,
            self.seen,
            context.gate,
            evaluates_at=self._evaluates_at,
            saves_at=self._saves_at,
            evaluate=self.evaluate,
            save=self.save,
            seconds=self._config.timeouts.rendezvous,
        )
        self.recorder = Recorder(
            context.counted, context.display, self.seen, self.conductor, rollbacks=len(context.rollbacks)
        )

    def after_pause(self, number: int, state: TrainState) -> TrainState:
        """Saves if a save is due, and does what callbacks requested."""
        state = self.conductor.after_pause(number, state)
        self._context.guards.done(number)
        return state

    def record(self, progress: Progress) -> None:
        """Records a logged step; raises the errors of a save that is under way."""
        self._context.checkpoints.check()
        self.recorder(progress)

    def _saves_at(self, number: int) -> bool:
        """Returns True if the run saves after a step, without any request of a callback."""
        return is_due(number, self._config.checkpoint.every, self._config.train.steps)

    def _evaluates_at(self, number: int) -> bool:
        due = is_due(number, self._config.eval.every, self._config.train.steps)
        return due and self._built.splits.evaluation is not None

    def evaluate(self, number: int, state: TrainState) -> dict[str, float]:
        """Returns the metrics of an evaluation, by name."""
        source, watchdog = self._built.splits.evaluation, self._context.guards.watchdog
        assert source is not None
        with watchdog.phase(number, "evaluation"):
            found = evaluate_sources(
                watchdog.follow(self._built.step),
                self._context.evaluated_params(state),
                state.model_state,
                [source],
                global_batch=self._config.train.global_batch,
                follow=watchdog.goes_on,
                max_batches=self._config.eval.batches or None,
                threads=self._config.data.threads,
                limits=self._built.limits,
                layout=self._config.data.layout,
            )
        return {f"eval_{name}": value for name, value in found.items()}

    def save(self, number: int, state: TrainState, notes: Mapping[str, Any]) -> None:
        """Compares the replicas, and starts an asynchronous save."""
        context = self._context
        context.guards.compare(number, state)
        with context.guards.watchdog.phase(number, "save"):
            context.ownership.check()
            notes = {**notes, "data": data_position(number, context.rollbacks.left_out)}
            context.checkpoints.save(number, state, context.display.message, notes=notes, also_keep=self.seen.kept)


def run_for_callbacks(
    built: Built, folder: Path, *, start: int, can_scale: bool, say: Callable[[str], None], left_out: tuple[int, ...]
) -> Run:
    """Returns the view of a run that its callbacks get.

    Args:
        built: The run.
        folder: The run directory.
        start: Steps done.
        can_scale: Whether the optimizer's state holds a factor of the learning rate.
        say: Prints a line.
        left_out: Numbers of the batches that are skipped.
    """
    config = built.config
    run = Run(
        folder=folder,
        start=start,
        num_steps=config.train.steps,
        batch=config.train.global_batch,
        examples=len(built.splits.train),
        left_out=left_out,
        config=as_plain(config),
        evaluates=built.splits.evaluation is not None,
        metrics=lambda: [f"eval_{name}" for name in metric_names(built.step, built.batch)],
        say=say,
        can_scale=can_scale,
    )

    def generate(prompt: str, length: int, temperature: float) -> str:
        assert run.state is not None
        return sample_text(built, run.state.params, prompt, length, temperature)

    run.generate = generate if writes_text(built) else None
    return run


class FlopsOfSteps:
    """Counts the model's floating-point operations per step, for batches of the length that they had.

    Args:
        model: The model.
        source: The training examples.
        rows: Rows of a batch, over all processes.
        left_out: Numbers of the batches that are skipped.
    """

    def __init__(self, model: Model | BlockModel, source: Source, rows: int, *, left_out: tuple[int, ...] = ()) -> None:
        self._per_row, self._of_length, self._rows = model.flops_per_row, model.flops_of_length, rows
        self._left_out = left_out
        self._batches = source.in_batches(rows) if isinstance(source, BucketedSource) else None

    def __call__(self, start: int, stop: int) -> float | None:
        """Returns the mean over the steps after `start` up to `stop`; None if it is unknown."""
        if self._per_row is None or self._of_length is None or self._batches is None or stop <= start:
            return None if self._per_row is None else self._per_row * self._rows
        batches = np.array([batch_number(step, self._left_out) for step in range(start, stop)])
        lengths, times = np.unique(self._batches.length_of(batches), return_counts=True)
        each = [self._of_length(int(length)) for length in lengths]
        return self._rows * float(np.average(each, weights=times))


class Recorder:
    """Records logged steps: in metrics.jsonl (open in process 0 within the context), on the display, for callbacks."""

    def __init__(self, built: Built, display: Display, run: Run, conductor: Conductor, *, rollbacks: int = 0) -> None:
        """Writes nothing yet.

        Args:
            built: The run.
            display: Shows each step.
            run: The view of the run that callbacks get.
            conductor: Passes each step to the callbacks.
            rollbacks: The number of rollbacks so far, part of every record if there were any.
        """
        rows, optimizer = built.config.train.global_batch, built.config.optimizer
        self._flops = FlopsOfSteps(built.model, built.splits.train, rows, left_out=run.left_out)
        self._counts_tokens = counts_tokens(built.splits)
        self._recorded = 0
        self._display, self._run, self._conductor = display, run, conductor
        steps = built.config.train.steps
        self._rate_of = rate_reader(make_learning_rate(optimizer.learning_rate, optimizer.schedule, steps), steps)
        self._follows_loss = is_plateau(optimizer.schedule)
        self._scales: dict[int, Array] = {}
        self._counts = {"rollbacks": rollbacks} if rollbacks else {}
        self._metrics: MetricsLog | None = None
        self._identity: Mapping[str, str] = {}

    @contextmanager
    def open(self, folder: Path, start: int, *, run: str = "") -> Iterator[None]:
        """Opens metrics.jsonl for the steps after `start`, for a `with` block.

        Args:
            folder: The run directory.
            start: Steps done.
            run: The identity of the run, which every record carries; "" = none.
        """
        self._recorded = start
        self._identity = {RUN: run} if run else {}
        with MetricsLog(folder / "metrics.jsonl", start_step=start) if is_main_process() else nullcontext() as metrics:
            self._metrics = metrics
            yield

    def __call__(self, progress: Progress) -> None:
        """Records a step."""
        record = self._record(progress)
        if self._metrics is not None:
            self._metrics.write({**record, **self._identity})
        self._display.update(record)
        self._conductor.logged(record)

    @property
    def after_step(self) -> Callable[[int, TrainState], None] | None:
        """Keeps the factor of a step's rate; None if the rate does not follow the loss."""
        return self._keep_scale if self._follows_loss else None

    def _keep_scale(self, number: int, state: TrainState) -> None:
        """Copies the factor on its device, because the next step consumes the state; waits for nothing."""
        if (scale := plateau_scale(state.opt_state)) is not None:
            self._scales[number] = jnp.copy(local_copy(scale))

    def _scale(self, number: int) -> float:
        """Returns the factor of the rate of a finished step, and drops those of the steps before it."""
        scale = self._scales.get(number)
        self._scales = {step: each for step, each in self._scales.items() if step > number}
        return 1.0 if scale is None else float(np.asarray(scale).flat[0])

    def _record(self, progress: Progress) -> Mapping[str, Any]:
        rate = self._rate_of(progress.step - 1) * self._run.learning_rate_factor * self._scale(progress.step)
        record = {**progress.record(), **self._counts, "learning_rate": rate}
        if self._counts_tokens:
            record.pop("rows_per_second", None)
        if (flops := self._flops(self._recorded, progress.step)) is not None:
            record["flops_per_second"] = flops / progress.seconds
        self._recorded = progress.step
        return record


def counts_tokens(splits: Splits) -> bool:
    """Returns True if the weight of a row is that of its tokens, so that speeds are in tokens and not in rows."""
    return splits.vocabulary is not None or np.ndim(splits.train[0]["weights"]) > 0
