"""What is recorded of a logged step: a line of metrics.jsonl, the display, and callbacks."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...configs.schema import Config
from ...data.source import Splits
from ...mesh.errors import UserError
from ...mesh.processes import is_main_process, local_copy
from ...parallel.step.state import TrainState
from ...training.callbacks.conductor import Conductor
from ...training.callbacks.run import Run
from ...training.display import Display
from ...training.metrics import MetricsLog
from ...training.optimizing.learning_rates import LearningRates, make_learning_rate
from ...training.optimizing.plateau import is_plateau, main_plateau_scale
from ...training.steps.late_log import Progress
from .build import Built
from .flops import FlopsOfSteps


class Recorder:
    """Records the logged steps of a run; a context manager, in which metrics.jsonl is open in process 0."""

    def __init__(self, built: Built, display: Display, run: Run, conductor: Conductor, *, rollbacks: int = 0) -> None:
        """Works out the learning rates, and writes nothing yet.

        Args:
            built: The run.
            display: Shows each step.
            run: As callbacks see it.
            conductor: Tells them of each step.
            rollbacks: How often the run went back so far; counted in every record once it has.

        Raises:
            UserError: The schedule gives a rate that is not a finite number.
        """
        rows = built.config.train.global_batch
        self._flops = FlopsOfSteps(built.model, built.splits.train, rows, left_out=run.left_out)
        self._rows = None if counts_tokens(built.splits) else rows
        self._recorded = 0
        self._display, self._run, self._conductor = display, run, conductor
        self._rates = learning_rates(built.config)
        self._follows_loss = is_plateau(built.config.optimizer.schedule)
        self._scales: dict[int, Array] = {}
        self._counts = {"rollbacks": rollbacks} if rollbacks else {}
        self._metrics: MetricsLog | None = None
        self._open = ExitStack()

    def open(self, folder: Path, start: int) -> Self:
        """Opens metrics.jsonl for the steps after `start`."""
        self._recorded = start
        if is_main_process():
            self._metrics = self._open.enter_context(MetricsLog(folder / "metrics.jsonl", start_step=start))
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __call__(self, progress: Progress) -> None:
        """Records a step."""
        record = self._record(progress)
        if self._metrics is not None:
            self._metrics.write(record)
        self._display.update(record)
        self._conductor.logged(record)

    @property
    def after_step(self) -> Callable[[int, TrainState], None] | None:
        """Keeps what the rate of a step was multiplied by; None where the rate does not follow the loss."""
        return self._keep_scale if self._follows_loss else None

    def _keep_scale(self, number: int, state: TrainState) -> None:
        """Waits for nothing.

        Args:
            number: Of a step that has just been started.
            state: The state after it, which the next step consumes: the scalar is copied on its device.
        """
        scale = main_plateau_scale(state.opt_state)
        if scale is not None:
            self._scales[number] = jnp.copy(local_copy(scale))

    def _scale(self, number: int) -> float:
        """What the rate of a step that is done was multiplied by; those of the steps before it are dropped."""
        scale = self._scales.get(number)
        self._scales = {step: each for step, each in self._scales.items() if step > number}
        return 1.0 if scale is None else float(np.asarray(scale).flat[0])

    def _record(self, progress: Progress) -> Mapping[str, Any]:
        rate = self._rates[progress.step - 1] * self._run.learning_rate_factor * self._scale(progress.step)
        record = {**progress._asdict(), **progress.extra, **self._counts, "learning_rate": rate}
        del record["extra"]
        if self._rows is not None:
            record["rows_per_second"] = self._rows / progress.seconds
        flops = self._flops(self._recorded, progress.step)
        if flops is not None:
            record["flops_per_second"] = flops / progress.seconds
        self._recorded = progress.step
        return record


def counts_tokens(splits: Splits) -> bool:
    """Whether the weight of a row is that of its tokens, so that speeds are in tokens and not in rows."""
    return splits.vocabulary is not None or np.ndim(splits.train[0]["weights"]) > 0


def learning_rates(config: Config) -> LearningRates:
    """The learning rate of every step of the run, by step from 0, so that no step waits for it.

    Raises:
        UserError: The schedule gives a rate that is not a finite number, of float32; names the first such step.
    """
    peak, num_steps = config.optimizer.learning_rate, config.train.steps
    rates = LearningRates(make_learning_rate(peak, config.optimizer.schedule, num_steps), num_steps)
    wrong = rates.first_not_finite()
    if wrong is not None:
        raise UserError(
            f"optimizer.schedule={dict(config.optimizer.schedule)} gives step {wrong + 1} the learning rate "
            f"{rates[wrong]}. Change its options or optimizer.learning_rate={config.optimizer.learning_rate}."
        )
    return rates
