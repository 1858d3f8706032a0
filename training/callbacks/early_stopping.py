"""Ends the run where a metric of its evaluations gets no better."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .callback import Callback
from .monitor import Mode, Monitor, number_problems, refuse
from .run import Run


@dataclass(kw_only=True)
class EarlyStopping(Callback):
    """Ends the run where a metric of its evaluations gets no better; it is complete then, exit code 0."""

    monitor: str = "eval_loss"
    """The metric."""
    patience: int = 3
    """Evaluations in a row without a better value, after which the run ends."""
    min_delta: float = 0.0
    """By how much a value has to be better to count."""
    mode: Mode = "min"
    """min, less is better; max, more is."""

    def __post_init__(self) -> None:
        refuse(number_problems({"patience": 1, "min_delta": 0}, vars(self)))
        self.monitors = self.monitor
        self._seen = Monitor(self.monitor, self.mode, self.min_delta)
        self._best_step = self._waited = 0

    def state(self) -> Mapping[str, Any]:
        """The best value, its step, and the evaluations since."""
        return {"best": self._seen.best, "best_step": self._best_step, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._seen.best, self._best_step, self._waited = state["best"], state["best_step"], state["waited"]

    def finished(self) -> str:
        """Why the run ends, where it has waited long enough."""
        if self._waited < self.patience:
            return ""
        return f"early stopping, for {self._seen.no_better(self._waited)}, since step {self._best_step}"

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Counts evaluations since the best."""
        if self._seen.improves(metrics):
            self._best_step, self._waited = run.step, 0
            return
        self._waited += 1
        if self.finished():
            run.stop(self.finished())
