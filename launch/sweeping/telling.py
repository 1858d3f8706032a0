"""What a sweep says of its runs: a table, one JSON object, and the page that compares them."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...layouts.sizes import format_bytes
from ...mesh.errors import UserError
from ...training.quantities import compact, duration, loss_text
from ...training.report.comparison import write_comparison
from ..reporting.compare import compared, config_differences
from ..reporting.figures import final_figures
from ..reporting.record import RunRecord, read_run
from .planning import SweptRun

PAGE, FACTS = "sweep.html", "sweep.json"
Status = Literal["left out", "waiting", "failed", "stopped", "finished"]
NONE = "–"
"""What stands where a run has no such figure."""


@dataclass(kw_only=True)
class Told:
    """A run of a sweep, and what has become of it.

    Attributes:
        run: which one.
        status: how far it is.
        exit_code: of its process, or of the check; None where there was none.
        reason: why it has not finished.
        has_begun: whether its folder says what it did: not where --fresh is yet to move aside what is there.
    """

    run: SweptRun
    status: Status
    exit_code: int | None = None
    reason: str = ""
    has_begun: bool = True

    @property
    def record(self) -> RunRecord | None:
        """What its folder says; None where it has logged nothing."""
        with suppress(UserError):
            return read_run(self.run.folder.absolute()) if self.run.folder and self.has_begun else None
        return None

    @property
    def stamp(self) -> tuple[int, int] | None:
        """Which config.yaml is in its folder; another one once a run has taken the folder. None where there is none."""
        with suppress(OSError):
            if self.run.folder:
                found = (self.run.folder / "config.yaml").stat()
                return found.st_ino, found.st_mtime_ns
        return None

    def plain(self) -> dict[str, Any]:
        """What is known of it: which run, how it ended, what it was predicted to hold and send, its final figures."""
        record = self.record
        return {
            "name": self.run.name,
            "values": dict(self.run.combination.values),
            "folder": str(self.run.folder or ""),
            "status": self.status,
            "exit_code": self.exit_code,
            "reason": self.reason,
            **self.run.costs,
            **(final_figures(record) if record else {}),
        }


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "name": ("run", str),
    "status": ("", str),
    "step": ("step", "{:,}".format),
    "devices": ("devices", "{:,}".format),
    "loss": ("loss", loss_text),
    "eval_loss": ("eval loss", loss_text),
    "tokens_per_second": ("tokens/s", compact),
    "rows_per_second": ("rows/s", compact),
    "seconds_per_step": ("time/step", duration),
    "predicted_bytes": ("memory/device", format_bytes),
    "collective_bytes": ("collectives/step", format_bytes),
}
"""Figure -> head of its column, and how it is written; a column that nobody has a figure for is left out."""


def as_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """Writes the table, and under it a line for each run that has a reason not to be finished.

    Args:
        runs: As `Told.plain` gives them.
    """
    reasons = [f"{run['name']}: {' '.join(run['reason'].split())}" for run in runs if run["reason"]]
    return "\n".join([table(runs), *reasons])


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Writes one line for each run, under heads.

    Args:
        runs: As `Told.plain` gives them.
    """
    shown = {key: how for key, how in COLUMNS.items() if any(run.get(key) is not None for run in runs)}
    lines = [[head for head, _ in shown.values()]]
    for run in runs:
        lines.append([NONE if run.get(key) is None else write(run[key]) for key, (_, write) in shown.items()])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(_padded, line, widths, range(len(line)))).rstrip() for line in lines)


def _padded(text: str, width: int, column: int) -> str:
    """Words stand on the left, numbers on the right."""
    return text.ljust(width) if column < 2 else text.rjust(width)


def write_page(told: Sequence[Told], folder: Path) -> Path | None:
    """Writes the page that compares the runs that have logged something.

    Args:
        told: All runs.
        folder: Of the sweep.

    Returns:
        The file; None where there are fewer than two such runs.

    Raises:
        OSError: It cannot be written.
    """
    records = [record for each in told if (record := each.record)]
    if len(records) < 2:
        return None
    write_comparison(folder / PAGE, compared(records), config_differences([record.config for record in records]))
    return folder / PAGE


def plain(told: Sequence[Told], folder: Path) -> dict[str, Any]:
    """The object that `--json` prints, and that sweep.json holds: `folder`, and `runs` in their order."""
    return {"folder": str(folder), "runs": [each.plain() for each in told]}


def write_facts(told: Sequence[Told], folder: Path) -> None:
    """Writes sweep.json; the file is replaced as a whole, also where two sweeps of one folder write it.

    Raises:
        OSError: It cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f"{FACTS}.{os.getpid()}.partial"
    try:
        beside.write_text(json.dumps(plain(told, folder), indent=2) + "\n", encoding="utf-8")
        beside.replace(folder / FACTS)
    finally:
        with suppress(OSError):
            beside.unlink()
