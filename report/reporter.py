"""The report that a run writes: report.json when training starts, and report.html at the end."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..mesh.errors import printable
from ..runtime.build_run import Built
from ..runtime.explain import Explanation, describe_schedule
from ..runtime.finish import Ending
from .page import REPORT, write_report
from .run_facts import Facts, StepCosts, read_facts, write_facts
from .run_record import latest, read_run

MAX_DRAWN = 4000
"""Stages times ticks of the largest schedule that the report draws, about one megabyte."""


class RunReporter:
    """Writes the report of a run; `runtime.finish.Reporter` describes the methods."""

    def is_finished(self, folder: Path, step: int) -> bool:
        """Returns True if the report belongs to this step: not older than its checkpoint, and written by the run."""
        report = folder / REPORT
        checkpoint = folder / "checkpoints" / str(step)
        if not report.exists() or report.stat().st_mtime < checkpoint.stat().st_mtime:
            return False
        facts = read_facts(folder)
        return facts is None or facts.finished >= step

    def start(self, built: Built, explanation: Explanation, folder: Path) -> None:
        """Writes report.json, so that the report can be drawn during training; ignores a file system that refuses."""
        with suppress(OSError):
            write_facts(folder, run_facts(built, explanation))

    def finish(
        self, built: Built, explanation: Explanation, folder: Path, ending: Ending
    ) -> tuple[dict[str, Any], Path]:
        """Writes report.json and report.html; returns the final figures and the file."""
        facts = replace(
            run_facts(built, explanation),
            finished=ending.step,
            figures=ending.figures,
            measured=ending.measured,
            sample=printable(ending.sample),
        )
        write_facts(folder, facts)
        record = read_run(folder)
        figures: dict[str, Any] = {"steps": record.step, **ending.figures}
        eval_loss = latest(record.metrics, "eval_loss")
        if eval_loss is not None:
            figures["eval_loss"] = eval_loss
        return figures, write_report(record)


def run_facts(built: Built, explanation: Explanation) -> Facts:
    """Returns the content of report.json that is known when a run starts."""
    return Facts(
        model=built.model.name,
        parameters=built.layouts.num_parameters,
        data=printable(built.splits.description),
        table=built.layouts.table,
        costs=step_costs(explanation),
    )


def step_costs(explanation: Explanation) -> StepCosts:
    """Returns the part of an explanation that the report shows; a large schedule only as text."""
    schedule = explanation.schedule
    drawn = schedule is not None and schedule.stages * schedule.num_ticks <= MAX_DRAWN
    return StepCosts(
        held=explanation.bytes_per_device,
        compiled=explanation.compiled,
        predicted=explanation.predicted,
        found=explanation.found,
        notes=explanation.notes,
        unexpected=explanation.unexpected,
        fewer=explanation.fewer,
        schedule=schedule if drawn else None,
        schedule_text=describe_schedule(schedule) if schedule is not None else "",
    )
