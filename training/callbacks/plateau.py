"""Lowers the learning rate where a metric of the evaluations gets no better.

Of the training loss, `optax.contrib.reduce_on_plateau` does the same within the compiled step; see docs/callbacks.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .callback import Callback
from .monitor import Mode, Monitor, number_problems, refuse
from .run import Run


@dataclass(kw_only=True)
class ReduceOnPlateau(Callback):
    """Lowers the learning rate where a metric of the evaluations gets no better."""

    changes_learning_rate: ClassVar[bool] = True

    monitor: str = "eval_loss"
    """The metric."""
    factor: float = 0.5
    """What the learning rate is multiplied by."""
    patience: int = 3
    """Evaluations in a row without a better value, after which it is lowered."""
    min_delta: float = 0.0
    """By how much a value has to be better to count."""
    mode: Mode = "min"
    """min, less is better; max, more is."""
    cooldown: int = 0
    """Evaluations after a reduction that are not counted."""
    min_factor: float = 1e-3
    """The learning rate is never lowered to less than this part of its schedule."""

    def __post_init__(self) -> None:
        problems = number_problems({"patience": 1, "min_delta": 0, "cooldown": 0}, vars(self))
        problems += [
            f"{name}={vars(self)[name]} has to be over 0 and less than 1."
            for name in ("factor", "min_factor")
            if not 0 < vars(self)[name] < 1
        ]
        refuse(problems)
        self.monitors = self.monitor
        self._seen = Monitor(self.monitor, self.mode, self.min_delta)
        self._waited = self._resting = 0

    def state(self) -> Mapping[str, Any]:
        """The best value, the evaluations since, and those of the cooldown that are left."""
        return {"best": self._seen.best, "waited": self._waited, "resting": self._resting}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._seen.best, self._waited, self._resting = state["best"], state["waited"], state["resting"]

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Counts evaluations since the best, and lowers the rate."""
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
        run.say(f"Step {run.step}: {self._seen.no_better(self._waited)}; {rate}.")
        self._waited, self._resting = 0, self.cooldown
