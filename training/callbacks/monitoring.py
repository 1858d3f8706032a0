"""Callbacks that monitor a metric of the evaluations: early stopping, a lower learning rate, the best checkpoints."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from ...layouts.sizes import counted
from ...mesh.errors import UserError, did_you_mean
from ...mesh.files import write_text
from .callback import Callback, Run

BEST = "best.json"
Mode = Literal["min", "max"]
Evaluations = Annotated[int, Ge(1)]
Ratio = Annotated[float, Gt(0), Lt(1)]


class Monitor:
    """The best value of a metric so far.

    Attributes:
        best: The best value; None before the first finite one.
    """

    def __init__(self, name: str, mode: Mode, min_delta: float = 0.0) -> None:
        """Starts without a value.

        Args:
            name: The metric.
            mode: Whether a smaller (min) or larger (max) value is better.
            min_delta: The minimum improvement.
        """
        self.name, self.mode, self.min_delta = name, mode, min_delta
        self.best: float | None = None

    def value(self, metrics: Mapping[str, float]) -> float:
        """Returns the metric of an evaluation.

        Raises:
            UserError: The evaluation does not have the metric.
        """
        if self.name not in metrics:
            near = did_you_mean(self.name, metrics, otherwise="It has")
            raise UserError(f"callbacks: monitor={self.name!r} is not a metric of the evaluation.{near}")
        return metrics[self.name]

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether an evaluation is the best so far, and records it. Values that are not finite never are."""
        value = self.value(metrics)
        if not math.isfinite(value):
            return False
        if self.best is not None and not self.is_better(value, self.best, self.min_delta):
            return False
        self.best = value
        return True

    def is_better(self, value: float, other: float, by: float = 0.0) -> bool:
        """Returns whether a value is better than another by more than `by`."""
        return value < other - by if self.mode == "min" else value > other + by

    def describe_stall(self, evaluations: int) -> str:
        """Returns "eval_loss has not fallen from 2.5 in 3 evaluations"."""
        verb = "fallen" if self.mode == "min" else "risen"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        best = f" from {self.best:.6g}" if self.best is not None else ""
        return f"{self.name} has not {verb}{by}{best} in {counted(evaluations, 'evaluation')}"


@dataclass(kw_only=True)
class EarlyStopping(Callback):
    """Ends the run if a metric of its evaluations stops improving; the run is then complete, exit code 0."""

    monitor: str = "eval_loss"
    """The metric."""
    patience: Evaluations = 3
    """Consecutive evaluations without improvement after which the run ends."""
    min_delta: Annotated[float, Ge(0)] = 0.0
    """Minimum improvement."""
    mode: Mode = "min"
    """min, smaller is better; max, larger is better."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.monitors = self.monitor
        self._seen = Monitor(self.monitor, self.mode, self.min_delta)
        self._best_step = self._waited = 0

    def state(self) -> Mapping[str, Any]:
        """Returns the best value, its step, and the number of evaluations since."""
        return {"best": self._seen.best, "best_step": self._best_step, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self._seen.best, self._best_step, self._waited = state["best"], state["best_step"], state["waited"]

    def finished(self) -> str:
        """Returns the reason to end the run, or ""."""
        if self._waited < self.patience:
            return ""
        return f"early stopping, for {self._seen.describe_stall(self._waited)}, since step {self._best_step}"

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Counts evaluations since the best one."""
        if self._seen.improves(metrics):
            self._best_step, self._waited = run.step, 0
            return
        self._waited += 1
        if self.finished():
            run.stop(self.finished())


@dataclass(kw_only=True)
class ReduceOnPlateau(Callback):
    """Lowers the learning rate if a metric of the evaluations stops improving.

    For the training loss, the schedule `plateau` does the same within the compiled step.
    """

    changes_learning_rate: ClassVar[bool] = True

    monitor: str = "eval_loss"
    """The metric."""
    factor: Ratio = 0.5
    """Factor on the learning rate."""
    patience: Evaluations = 3
    """Consecutive evaluations without improvement after which the learning rate is lowered."""
    min_delta: Annotated[float, Ge(0)] = 0.0
    """Minimum improvement."""
    mode: Mode = "min"
    """min, smaller is better; max, larger is better."""
    cooldown: Annotated[int, Ge(0)] = 0
    """Evaluations after a reduction that are not counted."""
    min_factor: Ratio = 1e-3
    """Lower bound of the learning rate as a fraction of its schedule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.monitors = self.monitor
        self._seen = Monitor(self.monitor, self.mode, self.min_delta)
        self._waited = self._resting = 0

    def state(self) -> Mapping[str, Any]:
        """Returns the best value, the number of evaluations since, and the rest of the cooldown."""
        return {"best": self._seen.best, "waited": self._waited, "resting": self._resting}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self._seen.best, self._waited, self._resting = state["best"], state["waited"], state["resting"]

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Counts evaluations since the best one, and lowers the learning rate."""
        if self._seen.improves(metrics):
            self._waited = 0
            return
        if self._resting:
            self._resting -= 1
            return
        self._waited += 1
        lowest = self.min_factor / run.learning_rate_factor
        if self._waited < self.patience or lowest >= 1:
            return
        by = max(self.factor, lowest)
        run.scale_learning_rate(by)
        rate = f"the learning rate is now {run.learning_rate_factor * by:.3g} of its schedule"
        run.say(f"Step {run.step}: {self._seen.describe_stall(self._waited)}; {rate}.")
        self._waited, self._resting = 0, self.cooldown


@dataclass(kw_only=True)
class BestCheckpoint(Callback):
    """Saves a checkpoint of the best evaluations, and keeps these in addition to the `checkpoint.keep` latest.

    `best.json` in the run directory lists their steps and values, best first.
    """

    monitor: str = "eval_loss"
    """The metric."""
    mode: Mode = "min"
    """min, smaller is better; max, larger is better."""
    keep: Evaluations = 1
    """Number of best checkpoints to keep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.monitors = self.monitor
        self._seen = Monitor(self.monitor, self.mode)
        self._best: list[tuple[int, float]] = []

    def state(self) -> Mapping[str, Any]:
        """Returns the best steps with their values."""
        return {"best": self._best}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self._best = [(int(step), float(value)) for step, value in state["best"]]

    def on_train_begin(self, run: Run) -> None:
        """Keeps the checkpoints that the run kept before."""
        self._keep(run)

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Requests a checkpoint if this evaluation is among the best; of equal ones, the first stays."""
        value = self._seen.value(metrics)
        if not math.isfinite(value):
            return
        others = [best for best in self._best if best[0] != run.step]
        place = sum(not self._seen.is_better(value, other) for _, other in others)
        if place < self.keep:
            self._best = [*others[:place], (run.step, value), *others[place:]][: self.keep]
            self._keep(run)
            run.save()

    def on_save_end(self, run: Run) -> None:
        """Writes best.json."""
        if run.is_main and self._best:
            best = [{"step": step, self.monitor: value} for step, value in self._best]
            text = json.dumps({"monitor": self.monitor, "mode": self.mode, "best": best}, indent=1)
            write_text(run.folder / BEST, text + "\n")

    def _keep(self, run: Run) -> None:
        run.keep(self, (step for step, _ in self._best))
