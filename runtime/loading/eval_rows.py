"""The rows of an evaluation, compared with those in the log of the run, and the comparison of their values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...configs.load import load_config
from ...configs.schema import Config
from ...mesh.errors import UserError, counted
from ...training.metrics import read_metrics

ROUNDING = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3}
"""The relative difference that another mesh can cause, by the dtype of the computation."""


class EvalRows(NamedTuple):
    """The part of a split that an evaluation uses.

    Attributes:
        of: Rows of the split.
        batch: Rows of a batch.
        batches: The number of batches; None = all.
        logged: The number of batches of an evaluation in the log of the run, of `logged_batch` rows each; 0 = all,
            None = no evaluation of the same rows.
        logged_batch: Rows of each of those batches.
    """

    of: int
    batch: int
    batches: int | None = None
    logged: int | None = None
    logged_batch: int = 1

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.of if self.batches is None else min(self.of, self.batches * self.batch)

    @property
    def logged_rows(self) -> int | None:
        """The number of rows of an evaluation in the log of the run; None if it used others."""
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
        """The rows in the log of the run, and how to use the same; "" if they are the same."""
        if self.logged_rows is None or self.logged_rows == self.rows:
            return ""
        if not self.logged:
            return "The log of the run has figures of all of them (eval.batches=0): leave out --batches for the same."
        fits = (self.logged * self.logged_batch) % self.batch == 0
        same = f": --batches {self.logged * self.logged_batch // self.batch} takes the same" if fits else ""
        return f"The log of the run has figures of {self.logged_rows:,} of them (eval.batches={self.logged}){same}."


def count_eval_rows(source_rows: int, batch: int, batches: int | None, log: Config | None) -> EvalRows:
    """Returns the part of a split that an evaluation uses.

    Args:
        source_rows: Rows of the split.
        batch: Rows of a batch.
        batches: The number of batches; None = all.
        log: The config that the run trains with, if it evaluates the same rows; otherwise None.
    """
    if log is None:
        return EvalRows(source_rows, batch, batches)
    return EvalRows(source_rows, batch, batches, log.eval.batches, log.train.global_batch)


def other_parameters(ema: bool, log: Config | None) -> str:
    """Returns a message if the evaluations in the log used other parameters, otherwise "".

    Args:
        ema: Whether averages are evaluated.
        log: The config, see `count_eval_rows`.
    """
    if log is None or ema == log.optimizer.ema.evaluate:
        return ""
    if ema:
        return "The log of the run has figures of the parameters themselves: leave out --ema for the same."
    return "The log of the run has figures of the averages (optimizer.ema.evaluate): --ema takes these."


def log_of_same_rows(folder: Path, config: Config) -> Config | None:
    """Reads the config that a run trains with, if the evaluations in its log are of the data of another config.

    That is the config.yaml in the run directory: only this file contains the key=value arguments of the training.

    Args:
        folder: The run directory.
        config: The config whose data is evaluated.

    Returns:
        None if the data is different, or if config.yaml is missing or invalid.
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
