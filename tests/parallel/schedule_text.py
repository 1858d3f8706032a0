"""Schedules as they are written, for tests: a line for each stage, a cell for each tick."""

from spmdkit.parallel.schedule.table import Action, Kind, Schedule

# two stages, two microbatches, GPipe's order; a gradient is passed on before its W
TWO = """
F0,F1,,B0,W0,B1,W1
,F0,B0,F1,B1,W0,W1
"""


def parse(text: str, **fields) -> Schedule:
    """A table as it is written, unchecked; short lines are padded."""
    kinds = dict(zip("FRBW", list(Kind)[1:], strict=True))
    cells = [line.split(",") for line in text.split()]
    ticks = max(map(len, cells))

    def action(cell: str) -> Action | None:
        number, _, chunk = cell[1:].partition(".")
        return Action(kinds[cell[0]], int(number), int(chunk or 0)) if cell else None

    by_stage = tuple(tuple(map(action, line + [""] * (ticks - len(line)))) for line in cells)
    fields = {"name": "mine", "stages": len(by_stage), "microbatches": 2, **fields}
    return Schedule(by_stage=by_stage, **fields)
