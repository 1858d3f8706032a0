"""How many rows an evaluation takes, how many those in the log of the run took, and if both found the same values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...configs.load import load_config
from ...configs.schema import Config
from ...mesh.errors import UserError
from ...mesh.text import counted
from ...training.metrics import read_metrics

ROUNDING = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3}
"""Relative difference that another mesh explains, by the dtype of the computation."""


class Extent(NamedTuple):
    """How much of a split an evaluation takes.

    Attributes:
        of: rows of the split.
        batch: rows of a batch.
        batches: how many it takes; None = all there are.
        logged: batches that an evaluation in the log of the run takes, of `logged_batch` rows each; 0 = all there are,
            None = none of the same rows.
        logged_batch: rows of each of those.
    """

    of: int
    batch: int
    batches: int | None = None
    logged: int | None = None
    logged_batch: int = 1

    @property
    def rows(self) -> int:
        """How many rows are taken."""
        return self.of if self.batches is None else min(self.of, self.batches * self.batch)

    @property
    def logged_rows(self) -> int | None:
        """How many an evaluation in the log of the run took; None where it took others."""
        if self.logged is None:
            return None
        return min(self.of, self.logged * self.logged_batch) if self.logged else self.of

    def __str__(self) -> str:
        return self.text()

    def text(self, *, same_values: bool = True) -> str:
        """Describes the rows; `same_values` is False if the log of the same rows has other values."""
        rows = f"all {self.of:,} rows" if self.rows == self.of else f"{self.rows:,} of {self.of:,} rows"
        logged = ", as in the log of the run" if self.logged_rows == self.rows and same_values else ""
        return f"{rows}, {counted(-(-self.rows // self.batch), 'batch', 'batches')} of {self.batch:,}{logged}"

    @property
    def difference(self) -> str:
        """What the log of the run took instead, and how to take the same; "" where there is no difference."""
        if self.logged_rows is None or self.logged_rows == self.rows:
            return ""
        if not self.logged:
            return "The log of the run has figures of all of them (eval.batches=0): leave out --batches for the same."
        fits = (self.logged * self.logged_batch) % self.batch == 0
        same = f": --batches {self.logged * self.logged_batch // self.batch} takes the same" if fits else ""
        return f"The log of the run has figures of {self.logged_rows:,} of them (eval.batches={self.logged}){same}."


def extent_of(source_rows: int, batch: int, batches: int | None, log: Config | None) -> Extent:
    """How much of a split an evaluation takes.

    Args:
        source_rows: Of the split.
        batch: Rows of a batch.
        batches: How many to take; None = all.
        log: The config that the run trains with, where it evaluates the same rows; else None.
    """
    if log is None:
        return Extent(source_rows, batch, batches)
    return Extent(source_rows, batch, batches, log.eval.batches, log.train.global_batch)


def other_parameters(ema: bool, log: Config | None) -> str:
    """Which parameters the evaluations in the log are of, where it is others than are evaluated; else "".

    Args:
        ema: Whether averages are evaluated.
        log: As in `extent_of`.
    """
    if log is None or ema == log.optimizer.ema.evaluate:
        return ""
    if ema:
        return "The log of the run has figures of the parameters themselves: leave out --ema for the same."
    return "The log of the run has figures of the averages (optimizer.ema.evaluate): --ema takes these."


def log_of_same_rows(folder: Path, config: Config) -> Config | None:
    """Reads the config that a run trains with, if the evaluations in its log are of the data of another config.

    That is the config.yaml in the folder, by whatever config the run was found: it alone holds the key=value of the
    training.

    Args:
        folder: The run.
        config: The config whose data is evaluated.

    Returns:
        None if the data is another, or if config.yaml is missing or cannot be read.
    """
    try:
        log = load_config(folder / "config.yaml", sizes=False)
    except (UserError, OSError):
        return None
    return log if (log.data, log.run.root) == (config.data, config.run.root) else None


def logged_metrics(folder: Path, step: int) -> dict[str, float]:
    """Reads the evaluation that a run logged after a step: name without "eval_" -> value; empty if there is none."""
    try:
        records = read_metrics(folder / "metrics.jsonl")
    except (UserError, OSError):
        return {}
    record: Mapping[str, Any] = next((each for each in reversed(records) if each.get("step") == step), {})
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in record.items()
        if name.startswith("eval_") and isinstance(value, int | float)
    }


def difference_from_log(metrics: Mapping[str, float], logged: Mapping[str, float], compute: str) -> str:
    """Compares an evaluation with that in the log of the same rows and parameters.

    Args:
        metrics: The metrics found now.
        logged: From `logged_metrics`.
        compute: The dtype of the computation, `precision.compute`.

    Returns:
        A warning with both values; "" if they agree up to rounding.
    """
    bound = ROUNDING.get(compute, ROUNDING["float32"])
    differing = [
        f"{name} {metrics[name]:.6g} here, {value:.6g} in the log"
        for name, value in logged.items()
        if name in metrics and not abs(metrics[name] - value) <= bound * max(abs(metrics[name]), abs(value), 1e-3)
    ]
    if not differing:
        return ""
    return (
        f"warning: the log of the run has other values for the same rows and step: {'; '.join(differing)}. The model's "
        "code, its data, a library, or metrics.jsonl has changed since, or the parameters are not those of the run "
        "(spmdkit checkpoint verify)."
    )
