"""What is recorded of a logged step: a line of metrics.jsonl, the display, and callbacks."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from ...configs.schema import Config
from ...mesh.errors import UserError
from ...mesh.processes import is_main_process
from ...training.callbacks.conductor import Conductor
from ...training.callbacks.run import Run
from ...training.display import Display
from ...training.loop import Progress
from ...training.metrics import MetricsLog
from ...training.optimizing.learning_rates import LearningRates, make_learning_rate
from .build import Built


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
        self._model, self._rows = built.model, built.config.train.global_batch
        self._display, self._run, self._conductor = display, run, conductor
        self._rates = learning_rates(built.config)
        self._counts = {"rollbacks": rollbacks} if rollbacks else {}
        self._metrics: MetricsLog | None = None
        self._open = ExitStack()

    def open(self, folder: Path, start: int) -> Self:
        """Opens metrics.jsonl for the steps after `start`."""
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

    def _record(self, progress: Progress) -> Mapping[str, Any]:
        rate = self._rates[progress.step - 1] * self._run.learning_rate_factor
        record = {**progress._asdict(), **progress.extra, **self._counts, "learning_rate": rate}
        del record["extra"]
        if self._model.flops_per_row is not None:
            record["flops_per_second"] = self._model.flops_per_row * self._rows / progress.seconds
        return record


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
