"""What `spmdkit report` writes and says of one run or several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...layouts.sizes import counted
from ...mesh.errors import UserError
from ...mesh.files import check_replaceable
from ...training.quantities import loss_text
from ...training.report.comparison import MISSING, ROWS, write_comparison
from ..inspection.finding import shown
from .compare import compared, config_differences
from .figures import final_figures
from .record import RunRecord
from .renew import REPORT, renew


class Told(NamedTuple):
    """What is said of a page.

    Attributes:
        plain: For a program: `page`, `runs` (each its folder and figures), `config_differences` (key -> a value for
            each run; null where the key is missing or null).
        text: For people.
    """

    plain: dict[str, Any]
    text: str


def written(records: Sequence[RunRecord], out: Path | None, several: Path) -> Path:
    """Writes the report of one run, or the page that compares several.

    Args:
        records: Of the runs.
        out: The file; None for report.html of the one run.
        several: The file of several runs, where `out` is None.

    Returns:
        The file.

    Raises:
        UserError: It cannot be written there.
    """
    path = out or (records[0].folder / REPORT if len(records) == 1 else several)
    _check_page(path)
    if path.is_dir():
        name = REPORT if len(records) == 1 else several.name
        raise UserError(f"--out {path} is a folder. Give the name of a file in it: {path / name}.")
    try:
        if len(records) == 1:
            return renew(records[0], path)
        write_comparison(path, compared(records), config_differences([record.config for record in records]))
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Give another file with --out.") from error
    return path


def _check_page(path: Path) -> None:
    """Checks that only an HTML page would be replaced: not a config, a log, or a script.

    Raises:
        UserError: Another file has that name, or something that is not a regular file.
    """
    check_replaceable(path)
    if path.is_file() and path.stat().st_size and not path.read_bytes()[:100].lstrip().lower().startswith(b"<!doctype"):
        raise UserError(f"--out {path} is a file, but not an HTML page, and would be lost. Give another name.")


def told(records: Sequence[RunRecord], page: Path) -> Told:
    """Says what is on a page.

    Args:
        records: Of the runs.
        page: The file.
    """
    differences = config_differences([record.config for record in records])
    plain = {
        "page": str(page),
        "runs": [{"folder": str(record.folder), **final_figures(record)} for record in records],
        "config_differences": {
            key: [None if value is MISSING else value for value in values] for key, values in differences.items()
        },
    }
    lines = [_line(record) for record in records]
    if len(records) > 1:
        lines.append(f"{counted(len(differences), 'key')} of their configs differ: {', '.join(differences) or 'none'}")
    lines += [_missing(record) for record in records if record.facts is None]
    return Told(plain, "\n".join([*lines, f"Wrote {shown(page)}"]))


def _line(record: RunRecord) -> str:
    figures = final_figures(record)
    losses = [f"{ROWS[name].name} {loss_text(figures[name])}" for name in ("loss", "eval_loss") if name in figures]
    of = f" of {record.steps:,}" if record.steps else ""
    return f"{shown(record.folder)}: {', '.join([f'step {record.step:,}{of}', *losses])}"


def _missing(record: RunRecord) -> str:
    return f"{shown(record.folder)} has no report.json: layouts, memory and collectives are not shown."
