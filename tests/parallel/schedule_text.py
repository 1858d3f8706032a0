"""Schedules as they are written, for tests: a line for each stage, a cell for each tick."""

from spmdkit.parallel.schedule.table import Action, Kind, Schedule

# two stages, two microbatches, GPipe's order; a gradient is passed on before its W
TWO = """
F0,F1,,B0,W0,B1,W1
,F0,B0,F1,B1,W0,W1
"""


def parse(text: str, **fields) -> Schedule:
    """A table as it is written, unchecked; rows are padded."""
    kinds = dict(zip("FRBW", list(Kind)[1:], strict=True))
    cells = [line.split(",") for line in text.split()]
    ticks = max(map(len, cells))

    def action(cell: str) -> Action | None:
        number, _, chunk = cell[1:].partition(".")
        return Action(kinds[cell[0]], int(number), int(chunk or 0)) if cell else None

    rows = tuple(tuple(map(action, row + [""] * (ticks - len(row)))) for row in cells)
    fields = {"name": "mine", "stages": len(rows), "microbatches": 2, **fields}
    return Schedule(rows=rows, **fields)
