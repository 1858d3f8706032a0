"""The content of a run directory, and the figures of the run. It is only read, and the run may be in progress."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..configs.config_sources import read_run_config
from ..layouts.paths import flatten_mapping
from ..mesh.errors import UserError, counted
from ..runtime.goodput import GOODPUT, Goodput, ledger_lines, read_goodput
from ..training.callbacks.recording import SAMPLES
from ..training.metrics import read_metrics
from ..training.quantities import OWN_FIGURES, is_number, speed_key
from .charts import collect_points
from .run_facts import Facts, read_facts
from .time_course import Course, course_of


class RunRecord(NamedTuple):
    """The files of a run so far.

    Attributes:
        folder: The run directory.
        config: All keys, plain data.
        metrics: The records of metrics.jsonl, at least one, steps ascending.
        facts: The content of report.json; None if it is missing or corrupt.
        goodput: The time split; None if it is unknown.
        course: The time split over the time of the run, with its events.
        samples: The texts that the model generated during training: `step` and `text` of each.
    """

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    facts: Facts | None = None
    goodput: Goodput | None = None
    course: Course = Course([], [])
    samples: Sequence[Mapping[str, Any]] = ()

    @property
    def step(self) -> int:
        """The last logged step."""
        return self.metrics[-1]["step"]

    @property
    def steps(self) -> int | None:
        """The number of steps in the config; None if the config lacks it."""
        steps = flatten_mapping(self.config).get("train.steps")
        return steps if isinstance(steps, int) else None

    @property
    def title(self) -> str:
        """The run directory as the config names it."""
        return str(flatten_mapping(self.config).get("run.dir") or self.folder)

    @property
    def status(self) -> str:
        """The progress, such as "step 20 of 60"."""
        if self.facts and self.facts.finished >= self.step:
            return f"finished, {counted(self.step, 'step')}"
        if self.steps:
            return f"step {self.step:,} of {self.steps:,}"
        return f"step {self.step:,}"


def read_run(folder: Path) -> RunRecord:
    """Reads a run directory.

    Args:
        folder: The directory.

    Raises:
        UserError: The config or the metrics are missing, or a line of a file is corrupt.
    """
    metrics = _read_steps(folder / "metrics.jsonl")
    return RunRecord(
        folder=folder,
        config=_read_config(folder / "config.yaml"),
        metrics=metrics,
        facts=read_facts(folder),
        goodput=read_goodput(folder / GOODPUT),
        course=course_of(ledger_lines(folder / GOODPUT), metrics),
        samples=read_metrics(folder / SAMPLES) if (folder / SAMPLES).is_file() else [],
    )


def own_metrics(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the model's own metrics, without the prefix of evaluations."""
    names: set[str] = set()
    for record in metrics:
        names.update(name.removeprefix("eval_") for name in record if name not in OWN_FIGURES)
    return sorted(names)


def final_figures(record: RunRecord) -> dict[str, Any]:
    """Returns the figures by which runs are compared, as far as they are known.

    Returns:
        Name -> a finite number; the latest logged value, unless the name says otherwise. The model's own metrics come
        last.
    """
    metrics = record.metrics
    speed = speed_key(metrics)
    figures: dict[str, Any] = {
        "step": record.step,
        "steps": record.steps,
        speed: _median(metrics, speed),
        "seconds_per_step": _median(metrics, "seconds"),
        "flops_per_second": _median(metrics, "flops_per_second"),
        "loss": latest(metrics, "loss"),
        "eval_loss": latest(metrics, "eval_loss"),
    }
    evaluations = collect_points(metrics, "eval_loss")
    if evaluations:
        best_step, best_loss = min(evaluations, key=lambda point: point[1])
        figures["best_eval_step"] = best_step
        figures["best_eval_loss"] = best_loss
    goodput = record.goodput
    if goodput:
        figures["goodput"] = goodput.share
        figures["starts"] = goodput.starts
        figures["seconds"] = goodput.total
    facts = record.facts
    if facts:
        figures["parameters"] = facts.parameters
        figures["devices"] = facts.table.mesh.size
        figures["predicted_bytes"] = facts.costs.compiled.get("total")
        figures["measured_bytes"] = max(facts.measured.values(), default=None)
        figures["collective_bytes"] = sum(line.bytes for line in facts.costs.found)
    for name in own_metrics(metrics):
        figures[name] = latest(metrics, name)
        figures[f"eval_{name}"] = latest(metrics, f"eval_{name}")
    return {name: value for name, value in figures.items() if is_number(value)}


def _median(metrics: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Returns the median of a metric's finite values; None if there are none."""
    points = collect_points(metrics, key)
    return median(value for _, value in points) if points else None


def seconds_trained(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the time of all steps; None if a record lacks its seconds."""
    points = collect_points(metrics, "seconds")
    if len(points) < len(metrics):
        return None
    ends = [0, *(step for step, _ in points)]
    return sum(seconds * (end - start) for (end, seconds), start in zip(points, ends, strict=False))


def latest(metrics: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Returns the latest value of a metric that is a finite number; None if there is none."""
    points = collect_points(metrics, name)
    return points[-1][1] if points else None


def _read_steps(path: Path) -> list[dict[str, Any]]:
    records = []
    if path.is_file():
        records = [record for record in read_metrics(path) if type(record.get("step")) is int]
    if not records:
        state = "is empty" if path.is_file() else "is missing"
        raise UserError(
            f"{path} {state}: metrics to show are missing. Wait until the run has logged a step (run.log_every), or "
            "give another run."
        )
    return records


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_run_config(path, "or give another run.")
    except OSError as error:
        raise UserError(f"The config of the run cannot be read: {error}. Restore it, or give another run.") from error
