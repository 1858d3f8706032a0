"""Keeps the checkpoints of the best evaluations, beside the newest ones."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .callback import Callback
from .monitor import Mode, Monitor, number_problems, refuse
from .run import Run

NAME = "best.json"


@dataclass(kw_only=True)
class BestCheckpoint(Callback):
    """Saves where an evaluation is among the best, and keeps these checkpoints beside the `checkpoint.keep` newest.

    `best.json` in the folder of the run lists their steps and values, best first.
    """

    monitor: str = "eval_loss"
    """The metric."""
    mode: Mode = "min"
    """min, less is better; max, more is."""
    keep: int = 1
    """How many of the best to keep."""

    def __post_init__(self) -> None:
        refuse(number_problems({"keep": 1}, vars(self)))
        self.monitors = self.monitor
        self._seen = Monitor(self.monitor, self.mode)
        self._best: list[tuple[int, float]] = []

    def state(self) -> Mapping[str, Any]:
        """The best steps with their values."""
        return {"best": self._best}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._best = [(int(step), float(value)) for step, value in state["best"]]

    def on_train_begin(self, run: Run) -> None:
        """Keeps what a run has kept before."""
        self._keep(run)

    def on_evaluation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Asks for a checkpoint where this evaluation is among the best; of equal ones the first stays."""
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
        """Notes for people which are the best."""
        if run.is_main and self._best:
            best = [{"step": step, self.monitor: value} for step, value in self._best]
            beside = run.folder / f"{NAME}.new"
            beside.write_text(json.dumps({"monitor": self.monitor, "mode": self.mode, "best": best}, indent=1) + "\n")
            beside.replace(run.folder / NAME)

    def _keep(self, run: Run) -> None:
        run.keep(self, (step for step, _ in self._best))
