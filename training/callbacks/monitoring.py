"""Callbacks that monitor a metric of the evaluations: early stopping, a lower learning rate, the best checkpoints."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from ...layouts.sizes import counted
from ...mesh.files import write_text
from .callback import CatalogCallback, Run

BEST = "best.json"
Evaluations = Annotated[int, Ge(1)]
Ratio = Annotated[float, Gt(0), Lt(1)]


@dataclass(kw_only=True)
class Monitor(CatalogCallback):
    """Compares a metric of the evaluations."""

    monitor: str = "eval_loss"
    """The metric."""
    mode: Literal["min", "max"] = "min"
    """min, smaller is better; max, larger is better."""

    kept: ClassVar[tuple[str, ...]] = ("best",)
    """Names of the values that a checkpoint keeps; attributes with an underscore hold them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.monitors = self.monitor

    def state(self) -> Mapping[str, Any]:
        """Returns the values that are needed to continue."""
        return {name: getattr(self, f"_{name}") for name in self.kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        for name in self.kept:
            setattr(self, f"_{name}", state[name])

    def is_better(self, value: float, other: float, by: float = 0.0) -> bool:
        """Returns whether a value is better than another by more than `by`."""
        return value < other - by if self.mode == "min" else value > other + by


@dataclass(kw_only=True)
class PatientMonitor(Monitor):
    """Counts evaluations since the best one."""

    patience: Evaluations = 3
    """Consecutive evaluations without improvement after which the callback acts."""
    min_delta: Annotated[float, Ge(0)] = 0.0
    """Minimum improvement."""

    _best = None
    _waited = 0

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether an evaluation is the best so far, and records it. Values that are not finite never are."""
        value = metrics[self.monitor]
        better = self._best is None or self.is_better(value, self._best, self.min_delta)
        if not (math.isfinite(value) and better):
            return False
        self._best, self._waited = value, 0
        return True

    def describe_stall(self) -> str:
        """Returns "eval_loss has not fallen from 2.5 in 3 evaluations"."""
        verb = "fallen" if self.mode == "min" else "risen"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        best = f" from {self._best:.6g}" if self._best is not None else ""
        return f"{self.monitor} has not {verb}{by}{best} in {counted(self._waited, 'evaluation')}"


@dataclass(kw_only=True)
class EarlyStopping(PatientMonitor):
    """Ends the run if a metric of its evaluations stops improving; the run is then complete, exit code 0."""

    kept = ("best", "waited", "best_step")
    _best_step = 0

    def finished(self) -> str:
        """Returns the reason to end the run, or ""."""
        if self._waited < self.patience:
            return ""
        return f"early stopping, for {self.describe_stall()}, since step {self._best_step}"

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Counts evaluations since the best one."""
        if self.improves(metrics):
            self._best_step = run.step
            return
        self._waited += 1
        if self.finished():
            run.stop(self.finished())


@dataclass(kw_only=True)
class ReduceOnPlateau(PatientMonitor):
    """Lowers the learning rate if a metric of the evaluations stops improving.

    For the training loss, the schedule `plateau` does the same within the compiled step.
    """

    kept = ("best", "waited", "resting")
    _resting = 0
    changes_learning_rate: ClassVar[bool] = True

    factor: Ratio = 0.5
    """Factor on the learning rate."""
    cooldown: Annotated[int, Ge(0)] = 0
    """Evaluations after a reduction that are not counted."""
    min_factor: Ratio = 1e-3
    """Lower bound of the learning rate as a fraction of its schedule."""

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Counts evaluations since the best one, and lowers the learning rate."""
        if self.improves(metrics):
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
        run.say(f"Step {run.step}: {self.describe_stall()}; {rate}.")
        self._waited, self._resting = 0, self.cooldown


@dataclass(kw_only=True)
class BestCheckpoint(Monitor):
    """Saves a checkpoint of the best evaluations, and keeps these in addition to the `checkpoint.keep` latest.

    `best.json` in the run directory lists their steps and values, best first.
    """

    keep: Evaluations = 1
    """Number of best checkpoints to keep."""

    _best = ()
    """Steps with their values, best first."""

    def on_train_begin(self, run: Run) -> None:
        """Keeps the checkpoints that the run kept before."""
        self._keep(run)

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Requests a checkpoint if this evaluation is among the best; of equal ones, the first stays."""
        value = metrics[self.monitor]
        if not math.isfinite(value):
            return
        others = [best for best in self._best if best[0] != run.step]
        place = sum(not self.is_better(value, other) for _, other in others)
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
