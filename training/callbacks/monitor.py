"""A metric that is watched: whether an evaluation is better than the best so far."""

import math
from collections.abc import Mapping
from typing import Literal

from ...mesh.errors import UserError
from ...mesh.near_miss import did_you_mean

Mode = Literal["min", "max"]


class Monitor:
    """The best value of a metric so far."""

    def __init__(self, name: str, mode: Mode, min_delta: float = 0.0) -> None:
        """Has seen nothing yet.

        Args:
            name: Of the metric.
            mode: Whether less or more is better.
            min_delta: By how much a value has to be better to count.
        """
        self.name, self.mode, self.min_delta = name, mode, min_delta
        self.best: float | None = None

    def value(self, metrics: Mapping[str, float]) -> float:
        """The metric of an evaluation.

        Raises:
            UserError: An evaluation has no such metric.
        """
        if self.name not in metrics:
            near = did_you_mean(self.name, metrics, otherwise="It has")
            raise UserError(f"callbacks: monitor={self.name!r}: an evaluation has no such metric.{near}")
        return metrics[self.name]

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than all before it; then it is the best. What is not finite never is."""
        value = self.value(metrics)
        if not math.isfinite(value):
            return False
        if self.best is not None and not self.is_better(value, self.best, self.min_delta):
            return False
        self.best = value
        return True

    def is_better(self, value: float, other: float, by: float = 0.0) -> bool:
        """Whether a value is better than another, by more than so much."""
        return value < other - by if self.mode == "min" else value > other + by

    def no_better(self, evaluations: int) -> str:
        """Says that so many evaluations were no better: "eval_loss has not fallen from 2.5 in 3 evaluations"."""
        verb = "fallen" if self.mode == "min" else "risen"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        best = f" from {self.best:.6g}" if self.best is not None else ""
        return f"{self.name} has not {verb}{by}{best} in {evaluations} evaluation{'s' if evaluations > 1 else ''}"


def number_problems(minimum: Mapping[str, float], given: Mapping[str, float]) -> list[str]:
    """What is wrong with options that have a smallest value.

    Args:
        minimum: Option -> smallest value.
        given: Option -> value.
    """
    return [
        f"{name}={given[name]} has to be at least {least:g}, and finite."
        for name, least in minimum.items()
        if not least <= given[name] < math.inf
    ]


def refuse(problems: list[str]) -> None:
    """Raises a UserError of problems, a line each, where there are some."""
    if problems:
        raise UserError("\n".join(problems))
