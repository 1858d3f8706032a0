"""What happens between the steps of a run: evaluations and saves, what callbacks ask for, and the records of steps."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from ...configs.schema import Config
from ...data.batches import eval_batches
from ...parallel.model import Params
from ...parallel.sharding.stored_order import stored_order
from ...parallel.step.state import TrainState
from ...training.callbacks.conductor import Conductor
from ...training.checkpointing.checkpoints import Checkpoints
from ...training.display import Display
from ...training.ending.stopping import Gate
from ...training.loop import measure, metric_names
from ...training.optimizing.averaging import average_reader
from ...training.steps.late_log import Progress
from .batches import data_position
from .build import Built
from .callbacks import callbacks_of, seen_by_callbacks
from .directory.ownership import Ownership
from .guarding.guards import Guards
from .guarding.limits import data_limits
from .recorder import Recorder
from .rolling_back import Rollbacks
from .sample import sample_text, writes_text


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a run has from its first step to its last, whatever it goes back to.

    Attributes:
        built: what it trains.
        folder: where it lives.
        checkpoints: of the run.
        display: shows its steps.
        ownership: of the folder.
        gate: passes its steps.
        guards: watch it.
        rollbacks: so far.
    """

    built: Built
    folder: Path
    checkpoints: Checkpoints
    display: Display
    ownership: Ownership
    gate: Gate
    guards: Guards
    rollbacks: Rollbacks

    @cached_property
    def evaluated(self) -> Callable[[TrainState], Params]:
        """What evaluations read of a state: the parameters, or their averages (`optimizer.ema.evaluate`)."""
        averages = self.built.config.optimizer.ema.evaluate
        return average_reader(self.built.layouts) if averages else attrgetter("params")


class Pauses:
    """The pauses of the steps after one; a run that goes back has new ones, with new callbacks."""

    def __init__(self, around: Surroundings, start: int) -> None:
        """Makes the callbacks, and those who talk to them.

        Args:
            around: The run.
            start: Steps done.

        Raises:
            UserError: A callback cannot do its work.
        """
        self._around, self._built, self._config = around, around.built, around.built.config
        self.seen = seen_by_callbacks(
            self._config,
            around.folder,
            start=start,
            examples=len(self._built.splits.train),
            evaluates=self._built.splits.evaluation is not None,
            metrics=lambda: [f"eval_{name}" for name in metric_names(self._built.step, self._built.batch)],
            say=around.display.message,
            left_out=around.rollbacks.left_out,
            generate=partial(sample_text, self._built) if writes_text(self._built) else None,
        )
        self.conductor = Conductor(
            callbacks_of(self._config),
            self.seen,
            around.gate,
            evaluates_at=self._evaluates_at,
            saves_at=partial(saves_at, self._config),
            evaluate=self.evaluate,
            save=self.save,
            seconds=self._config.timeouts.rendezvous,
        )
        counted = len(around.rollbacks)
        self.recorder = Recorder(self._built, around.display, self.seen, self.conductor, rollbacks=counted)

    def pause(self, number: int, state: TrainState) -> dict[str, float]:
        """Between two steps: a comparison of copies before a save, and an evaluation, where they are due."""
        if saves_at(self._config, number):
            self._around.guards.compare(number, state)
        return self.conductor.pause(number, state)

    def after_pause(self, number: int, state: TrainState) -> TrainState:
        """Saves where that is due; what callbacks have asked for is done."""
        state = self.conductor.after_pause(number, state)
        self._around.guards.done(number)
        return state

    def record(self, progress: Progress) -> None:
        """Records a logged step; errors of a save under way surface here."""
        self._around.checkpoints.check()
        self.recorder(progress)

    def _evaluates_at(self, number: int) -> bool:
        if self._built.splits.evaluation is None:
            return False
        return _due(number, self._config.eval.every, self._config.train.steps)

    def evaluate(self, number: int, state: TrainState) -> dict[str, float]:
        """The metrics of an evaluation, by name."""
        source, watchdog = self._built.splits.evaluation, self._around.guards.watchdog
        assert source is not None
        batches = eval_batches(
            source,
            self._built.layouts.batch_sharding(),
            global_batch=self._config.train.global_batch,
            max_batches=self._config.eval.batches or None,
            threads=self._config.data.threads,
            limits=data_limits(self._config, self._built.splits),
            layout=self._config.data.layout,
        )
        with watchdog.phase(number, "evaluation"), closing(batches):
            params = self._around.evaluated(state)
            step = watchdog.follow(self._built.step)
            found = measure(step, params, watchdog.goes_on(batches), state.model_state)
        return {f"eval_{name}": value for name, value in found.items()}

    def save(self, number: int, state: TrainState, notes: Mapping[str, Any]) -> None:
        """Starts an asynchronous save."""
        around = self._around
        if not saves_at(self._config, number):  # where it was known before, `pause` has compared
            around.guards.compare(number, state)
        with around.guards.watchdog.phase(number, "save"):
            around.ownership.check()
            stored = stored_order(self._built.layouts).to_model(state)
            notes = {**notes, "data": data_position(number, around.rollbacks.left_out)}
            around.checkpoints.save(number, stored, around.display.message, notes=notes, also_keep=self.seen.kept)


def saves_at(config: Config, number: int) -> bool:
    """Whether a run saves after a step, whatever callbacks say."""
    return _due(number, config.checkpoint.every, config.train.steps)


def _due(number: int, every: int, last: int) -> bool:
    return number == last or (every > 0 and number % every == 0)
