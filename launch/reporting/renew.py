"""report.html of one run, from what its folder says; the same whether the run or a command writes it."""

from pathlib import Path

from ...training.report.report import write_report
from .figures import summary_of
from .record import RunRecord

REPORT = "report.html"


def renew(record: RunRecord, path: Path | None = None) -> Path:
    """Writes the report of a run; the file is replaced as a whole.

    Args:
        record: Of the run.
        path: The file; by default report.html in the folder of the run.

    Returns:
        The file.

    Raises:
        OSError: It cannot be written.
    """
    path, facts = path or record.folder / REPORT, record.facts
    write_report(
        path,
        config=record.config,
        metrics=record.metrics,
        table=facts.table if facts else None,
        mesh=facts.device_mesh if facts else None,
        summary=summary_of(record),
        sample=facts.sample if facts else None,
        samples=record.samples,
        costs=facts.step_costs if facts else None,
        goodput=record.goodput,
        course=record.course,
    )
    return path
