"""Compares an evaluation of a loaded run with that in the log of the run: its rows, its parameters, and its values."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ...configs.load import load_config
from ...mesh.errors import UserError
from ...training.metrics import read_metrics

if TYPE_CHECKING:
    from .loaded_run import LoadedRun

ROUNDING = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3}
"""The relative difference that another mesh can cause, by the dtype of the computation."""


class LogComparison(NamedTuple):
    """An evaluation, compared with that in the log of the run.

    Attributes:
        rows: The number of evaluated rows.
        log_rows: The number of rows of an evaluation in the log; None if the log is of other data, or missing.
        logged: The metrics in the log after the same step, of the same rows and parameters, by name.
        remark: A line about other rows or parameters in the log, and how to use the same; "" if they are the same.
        warning: A line with the values that differ; "" if all agree up to rounding.
    """

    rows: int
    log_rows: int | None = None
    logged: Mapping[str, float] = {}
    remark: str = ""
    warning: str = ""


def compare_with_log(
    run: "LoadedRun", source_rows: int, max_batches: int | None, metrics: Mapping[str, float]
) -> LogComparison:
    """Compares an evaluation of the run's evaluation split with the log of the run.

    The log is of the config.yaml in the run directory: only this file contains the key=value arguments of the training.

    Args:
        run: The run.
        source_rows: The number of rows of the split.
        max_batches: The number of batches that were evaluated; None = all.
        metrics: The metrics found.
    """
    rows = source_rows if max_batches is None else min(source_rows, max_batches * run.batch_rows)
    try:
        log = load_config(run.folder / "config.yaml", sizes=False)
        records = read_metrics(run.folder / "metrics.jsonl") if (run.folder / "metrics.jsonl").exists() else []
    except (UserError, OSError):
        return LogComparison(rows)
    if (log.data, log.run.root) != (run.config.data, run.config.run.root):
        return LogComparison(rows)
    log_rows = min(source_rows, log.eval.batches * log.train.global_batch) if log.eval.batches else source_rows
    if log_rows != rows:
        same = "omit --batches" if log_rows == source_rows else f"use --batches {log_rows // run.batch_rows}"
        fits = log_rows == source_rows or log_rows % run.batch_rows == 0
        remark = f"The log of the run is of {log_rows:,} rows (eval.batches={log.eval.batches})"
        return LogComparison(rows, log_rows, remark=f"{remark}: {same} for the same." if fits else f"{remark}.")
    if run.ema != log.optimizer.ema.evaluate:
        same = "parameters themselves: omit" if run.ema else "averages (optimizer.ema.evaluate): use"
        return LogComparison(rows, log_rows, remark=f"The log of the run is of the {same} --ema for the same.")
    record = next((each for each in reversed(records) if each.get("step") == run.step), {})
    logged = {
        name.removeprefix("eval_"): float(value)
        for name, value in record.items()
        if name.startswith("eval_") and isinstance(value, int | float)
    }
    bound = ROUNDING.get(run.config.precision.compute, ROUNDING["float32"])
    differing = [
        f"{name} {metrics[name]:.6g} here, {value:.6g} in the log"
        for name, value in logged.items()
        if name in metrics and not abs(metrics[name] - value) <= bound * max(abs(metrics[name]), abs(value), 1e-3)
    ]
    warning = (
        f"the log of the run has other values for the same rows and step: {'; '.join(differing)}. The model's code, "
        "its data, a library, or metrics.jsonl has changed since, or the parameters are not those of the run (spmdkit "
        "checkpoint verify)."
    )
    return LogComparison(rows, log_rows, logged, warning=warning if differing else "")
