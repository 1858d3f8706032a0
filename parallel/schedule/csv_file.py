"""Reads pipeline schedules from CSV files, and writes them.

    # placement: v
    F0,    , F0.1, B0.1, W0.1, B0, W0

One line per stage, one cell per tick: F (forward), R (recompute), B (backward to the input) or W (backward to the
weights), then the microbatch and, if the chunk is not 0, a dot and the chunk. An empty cell is an idle tick. The
numbers of stages, microbatches and chunks follow from the cells. Lines that start with # come first; two of them are
settings: `# placement: loop` or `v`, and `# joint: true` if a gradient is passed on only after its W.
"""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from ...mesh.errors import UserError, counted, raise_problems, unknown_name
from ...mesh.files import check_local
from .schedule_table import LETTERS, PLACEMENTS, Action, Placement, Schedule, check

KINDS = {letter: kind for kind, letter in LETTERS.items()}
CELL = re.compile(r"([FRBW])(\d+)(?:\.(\d+))?")
SETTING = re.compile(r"#\s*(\w+)\s*:\s*(\S*)\s*")
SETTINGS = {"placement": PLACEMENTS, "joint": ("true", "false")}


def read_schedule(
    path: str | Path, *, stages: int | None = None, microbatches: int | None = None, virtual: int | None = None
) -> Schedule:
    """Reads a schedule and checks that it can run.

    Args:
        path: A CSV file.
        stages: The required number of stages S; None for any.
        microbatches: The required number of microbatches M; None for any.
        virtual: The required number of chunks V; None for any.

    Returns:
        The schedule, named after the file.

    Raises:
        UserError: The file cannot be read, a cell or setting is invalid, sizes differ from the required ones, or
            `check` finds problems. Problems of one kind are reported together, with line and tick.
    """
    check_local(path, "The schedule")
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"Cannot read the schedule {path}: {reason}.") from error
    schedule = parse_schedule(text, path)
    wanted = {"stages": stages, "microbatches": microbatches, "chunks": virtual}
    problems = [
        f"it is a schedule for {getattr(schedule, name)} {name}, not for {size}"
        for name, size in wanted.items()
        if size is not None and getattr(schedule, name) != size
    ]
    _report(path, problems)
    return schedule


def parse_schedule(text: str, path: str | Path) -> Schedule:
    """Parses the text of a schedule, and checks that it can run.

    Args:
        text: The text, written by `csv_text` or a spreadsheet.
        path: The path of the text; its last part is the schedule's name.

    Raises:
        UserError: A cell or setting is invalid, or the schedule cannot run.
    """
    path, lines = Path(path), text.splitlines()
    problems: list[str] = []
    settings = _settings(lines, problems)
    by_stage = _by_stage(lines, problems)
    if not by_stage:
        problems.append("lines of actions are missing; give one for each stage, such as F0,B0,W0")
    actions = [action for own in by_stage for action in own if action is not None]
    num_microbatches = 1 + max((action.microbatch for action in actions), default=0)
    num_chunks = 1 + max((action.chunk for action in actions), default=0)
    if by_stage and num_microbatches * num_chunks > len(by_stage[0]):
        problems.append(
            f"microbatches up to {num_microbatches - 1} through chunks up to {num_chunks - 1} are more than its "
            f"{len(by_stage[0])} ticks can contain; both count from 0"
        )
    _report(path, problems)
    schedule = Schedule(
        name=path.name,
        stages=len(by_stage),
        microbatches=num_microbatches,
        chunks=num_chunks,
        placement=cast(Placement, settings.get("placement", "loop")),
        joint=settings.get("joint") == "true",
        by_stage=by_stage,
    )
    check(schedule)
    return schedule


def csv_text(schedule: Schedule) -> str:
    """Returns a schedule as text that `parse_schedule` reads as the same table."""
    settings = []
    if schedule.placement != "loop":
        settings.append(f"# placement: {schedule.placement}")
    if schedule.joint:
        settings.append("# joint: true")
    lines = [",".join("" if action is None else str(action) for action in own) for own in schedule.by_stage]
    return "\n".join([*settings, *lines]) + "\n"


def _settings(lines: Sequence[str], problems: list[str]) -> dict[str, str]:
    settings = {}
    for number, line in enumerate(lines, 1):
        found = SETTING.fullmatch(line.strip())
        if not found:
            continue
        name, value = found.groups()
        if name not in SETTINGS:
            problems.append(f"line {number}: {unknown_name('setting', name, SETTINGS)}")
        elif value not in SETTINGS[name]:
            problems.append(f"line {number}: {name} is {' or '.join(SETTINGS[name])}, not {value!r}")
        settings[name] = value
    return settings


def _by_stage(lines: Sequence[str], problems: list[str]) -> tuple[tuple[Action | None, ...], ...]:
    """Reads the actions of one stage from each nonempty line; short lines, as in spreadsheets, end with idle ticks."""
    by_stage: list[list[Action | None]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        own: list[Action | None] = []
        for tick, cell in enumerate(next(csv.reader([line]))):
            found = CELL.fullmatch(cell.strip())
            if cell.strip() and not found:
                place = f"line {number}, stage {len(by_stage)}, tick {tick}"
                problems.append(f"{place}: {cell.strip()!r} is not a valid action, such as F0, R1, B3, W3 or F0.1")
            own.append(Action(KINDS[found[1]], int(found[2]), int(found[3] or 0)) if found else None)
        by_stage.append(own)
    length = max(map(len, by_stage), default=0)
    return tuple((*own, *[None] * (length - len(own))) for own in by_stage)


def _report(path: Path, problems: Sequence[str]) -> None:
    raise_problems(problems, f"{counted(len(problems), 'problem')} in the schedule {path}:")
