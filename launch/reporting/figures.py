"""The figures of a run as a whole, from what its folder says."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from ...mesh.text import counted
from ...training.quantities import OWN_FIGURES, is_number, speed_key
from .record import RunRecord


def final_figures(record: RunRecord) -> dict[str, Any]:
    """Gives the figures that runs are compared by, as far as they are known; numbers alone, all finite.

    Args:
        record: Of a run.

    Returns:
        Name -> value; the last one that was logged, unless the name says something else. The model's own metrics come
        last, by their names.
    """
    found = {"step": record.step, "steps": record.steps, **dict(_speeds(record)), **_losses(record.metrics)}
    if record.goodput:
        found |= {"goodput": record.goodput.share, "starts": record.goodput.starts, "seconds": record.goodput.total}
    if record.facts:
        costs = record.facts.step_costs
        found |= {
            "parameters": record.facts.parameters,
            "devices": record.facts.device_mesh.size,
            "predicted_bytes": costs.compiled.get("total"),
            "measured_bytes": max(record.facts.measured.values(), default=None),
            "collective_bytes": sum(line.bytes for line in costs.found),
        }
    own = {name for each in record.metrics for name in each if name.removeprefix("eval_") not in OWN_FIGURES}
    found |= {name: last(record.metrics, name) for name in sorted(own)}
    return {name: value for name, value in found.items() if is_number(value)}


def summary_of(record: RunRecord) -> dict[str, Any]:
    """Gives what heads the report of a run, as `write_report` takes it.

    Args:
        record: Of the run.
    """
    return dict(_summary(record))


def last(metrics: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Gives the last value of a metric that is a finite number; None where there is none."""
    return next((each[name] for each in reversed(metrics) if is_number(each.get(name))), None)


def _summary(record: RunRecord) -> Iterator[tuple[str, Any]]:
    metrics, facts = record.metrics, record.facts
    yield "title", _title(record)
    yield "status", _status(record)
    if facts:
        yield from (("model", facts.model), ("parameters", facts.parameters), ("data", facts.data))
    yield "steps", record.step
    if all(is_number(each.get("seconds")) for each in metrics):
        ends = [0, *(each["step"] for each in metrics)]
        counts = (end - start for start, end in pairwise(ends))
        yield "seconds", sum(each["seconds"] * count for each, count in zip(metrics, counts, strict=True))
    if all(is_number(each.get("flops_per_second")) for each in metrics):
        yield "flops_per_second", median(each["flops_per_second"] for each in metrics)
    if last(metrics, "eval_loss") is not None:
        yield "eval_loss", last(metrics, "eval_loss")
    if facts:
        yield from facts.figures.items()


def _title(record: RunRecord) -> str:
    run = record.config.get("run")
    return str(run.get("dir") if isinstance(run, dict) and run.get("dir") else record.folder)


def _status(record: RunRecord) -> str:
    if record.facts and record.facts.finished >= record.step:
        return f"finished, {counted(record.step, 'step')}"
    return f"step {record.step:,}" + (f" of {record.steps:,}" if record.steps else "")


def _speeds(record: RunRecord) -> Iterator[tuple[str, float]]:
    speed = speed_key(record.metrics)
    for key, name in ((speed, speed), ("seconds", "seconds_per_step"), ("flops_per_second", "flops_per_second")):
        values = [each[key] for each in record.metrics if is_number(each.get(key))]
        if values:
            yield name, median(values)


def _losses(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {"loss": last(metrics, "loss"), "eval_loss": last(metrics, "eval_loss")}
    evaluated = [each for each in metrics if is_number(each.get("eval_loss"))]
    if evaluated:
        best = min(evaluated, key=lambda each: each["eval_loss"])
        found |= {"best_eval_loss": best["eval_loss"], "best_eval_step": best["step"]}
    return found
