"""Drawings of a pipeline schedule: lines of text for a terminal, and one self-contained SVG.

In the SVG, time runs to the right in units of the costs, and a tick is as wide as it lasts. If actions differ in
length, the gap after a short one is its wait for the slowest, hatched like all idle time. The curve under a stage is
the number of activations that it holds. The tooltip of an action names it.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from rich.text import Text

from ..parallel.schedule.schedule_table import LETTERS, Action, Kind, Schedule
from ..parallel.schedule.timing import (
    UNIT_COSTS,
    action_lengths,
    live_activations,
    measure,
    peak_activations,
    tick_lengths,
)
from .charts import ticks
from .templates import ENVIRONMENT

NAMES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD_INPUT: "backward to input",
    Kind.BACKWARD_WEIGHT: "backward to weights",
}
STYLES = {
    Kind.FORWARD: "white on #2f6fde",
    Kind.RECOMPUTE: "black on #7fb2f0",
    Kind.BACKWARD_INPUT: "black on #f0a04b",
    Kind.BACKWARD_WEIGHT: "white on #7a5bc7",
}
IDLE = "."
MAX_WIDTH = 1480
MIN_WIDTH = 640
"""Pixels of the whole timeline, as long as a tick is neither more than TICK wide nor less than MIN_TICK."""
TICK = 27
MIN_TICK = 4
"""Pixels of a tick."""
LEFT = 84
RIGHT = 92
TOP = 76
"""Pixels around the timeline."""
BAR = 28
"""The height of an action."""
CURVE = 16
"""The height of the curve under an action."""
PITCH = 56
"""The height from one stage to the next."""
LETTER_WIDTH = 6.4


def describe_sizes(schedule: Schedule) -> str:
    """Returns the name of a schedule and its sizes."""
    chunks = f" of {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    return f"{schedule.name}: {schedule.stages} stages{chunks}, {schedule.microbatches} microbatches"


def draw_text(schedule: Schedule, width: int) -> Text:
    """Draws a schedule: one line per stage, one cell per tick, in sections if it is wider than the terminal.

    Args:
        schedule: Any schedule.
        width: The columns of the terminal.

    Returns:
        Text in colors, which is complete without them.
    """
    cell = 1 + max((len(str(action)) for _, _, action in schedule.actions()), default=1)
    labels = [f"stage {stage}" for stage in range(schedule.stages)]
    margin = max(map(len, labels)) + 2
    across = max(5, (width - margin) // cell)
    text = Text(describe_sizes(schedule) + "\n")
    for start in range(0, schedule.num_ticks, across):
        section = range(start, min(start + across, schedule.num_ticks))
        text.append("\n").append(_tick_numbers(section, margin, cell), "dim")
        for label, actions in zip(labels, schedule.by_stage, strict=True):
            text.append("\n").append(_stage_line(label.ljust(margin), actions[section.start : section.stop], cell))
        text.append("\n")
    text.append("\n")
    for kind in _used_kinds(schedule):
        text.append(LETTERS[kind], STYLES[kind]).append(f" {NAMES[kind]}  ")
    text.append(f"{IDLE} idle")
    if schedule.chunks > 1:
        text.append("\nF3 is microbatch 3 in chunk 0, F3.1 the same in chunk 1")
    return text.append("\n")


def draw_svg(schedule: Schedule, costs: Sequence[float] = UNIT_COSTS) -> str:
    """Draws a schedule in the order in which it runs.

    Args:
        schedule: A schedule that `check` accepts.
        costs: See `measure`.

    Returns:
        The text of an SVG file that needs no other file.
    """
    ends = list(accumulate(tick_lengths(schedule, costs), initial=0.0))
    plot = max(min(TICK * schedule.num_ticks, MAX_WIDTH), MIN_TICK * schedule.num_ticks, MIN_WIDTH)
    scale = plot / ends[-1]
    bottom = TOP + schedule.stages * PITCH
    lives = [live_activations(schedule, stage) for stage in range(schedule.stages)]
    highest = max(map(max, lives))
    lengths = action_lengths(schedule, costs)

    def x(time: float) -> float:
        return round(LEFT + time * scale, 2)

    def draw_action(action: Action, tick: int) -> dict[str, Any]:
        letter = LETTERS[action.kind]
        start = ends[tick]
        width = lengths[action.kind] * scale
        gap = min(1.0, width * 0.1)
        chunk = f", chunk {action.chunk}" if schedule.chunks > 1 else ""
        return {
            "letter": letter,
            "x": round(x(start) + gap / 2, 2),
            "width": round(width - gap, 2),
            "round": round(min(3.0, width / 5), 1),
            "shade": round(1 - 0.6 * action.chunk / max(1, schedule.chunks - 1), 2),
            "hint": f"{action}: {NAMES[action.kind]} of microbatch {action.microbatch}{chunk}; "
            f"tick {tick}, time {start:g}",
            "label": _longest_label(action, width),
            "middle": round(x(start) + width / 2, 2),
        }

    def draw_curve(live: Sequence[int], base: float) -> str:
        steps = []
        for tick, count in enumerate(live):
            if tick == 0 or count != live[tick - 1]:
                steps.append(f"H{x(ends[tick])}V{base - CURVE * count / highest:.2f}")
        return f"M{LEFT} {base}{''.join(steps)}H{x(ends[-1])}V{base}Z"

    stages = []
    for stage, (actions, live) in enumerate(zip(schedule.by_stage, lives, strict=True)):
        y = TOP + stage * PITCH
        drawn = [draw_action(action, tick) for tick, action in enumerate(actions) if action is not None]
        curve = draw_curve(live, y + BAR + 2 + CURVE)
        stages.append({"y": y, "actions": drawn, "curve": curve, "peak": f"{max(live) / schedule.chunks:g}"})
    timing = measure(schedule, costs)
    figures = (
        f"time {timing.time:.6g} · ideal {timing.ideal_time:.6g} · {timing.bubble:.1%} idle · at most "
        f"{max(peak_activations(schedule)):g} microbatches of activations on a stage · costs "
        f"{', '.join(f'{cost:g}' for cost in costs)}"
    )
    return (
        ENVIRONMENT.get_template("schedule.svg").render(
            title=describe_sizes(schedule),
            figures=figures,
            width=LEFT + plot + RIGHT,
            height=bottom + 78,
            top=TOP,
            bottom=bottom,
            left=LEFT,
            right=x(ends[-1]),
            bar=BAR,
            curve=CURVE,
            times=[(x(time), f"{time:g}") for time in ticks(0, ends[-1], 10)],
            stages=stages,
            legend=list(_place_legend(schedule)),
        )
        + "\n"
    )


def _longest_label(action: Action, width: float) -> str:
    """Returns the longest label of an action that fits into a width in pixels, or ""."""
    labels = (str(action), f"{LETTERS[action.kind]}{action.microbatch}", str(action.microbatch))
    for label in labels:
        if len(label) * LETTER_WIDTH + 3 <= width:
            return label
    return ""


def _place_legend(schedule: Schedule) -> Iterator[tuple[str, float, str]]:
    """Yields the style, the place in pixels and the text of each entry of the legend."""
    entries = [(LETTERS[kind], f"{LETTERS[kind]}  {NAMES[kind]}") for kind in _used_kinds(schedule)]
    if schedule.chunks > 1:
        entries.append(("F", "full to pale: first chunk to last"))
    entries.append(("idle", "idle"))
    entries.append(("held", "activations held"))
    x = float(LEFT)
    for style, text in entries:
        yield style, round(x, 1), text
        x += 44 + LETTER_WIDTH * len(text)


def _used_kinds(schedule: Schedule) -> list[Kind]:
    return sorted({action.kind for _, _, action in schedule.actions()}, key=list(NAMES).index)


def _stage_line(label: str, actions: Sequence[Action | None], cell: int) -> Text:
    line = Text(label)
    for action in actions:
        if action is None:
            line.append(IDLE.ljust(cell - 1), "dim")
        else:
            line.append(str(action).ljust(cell - 1), STYLES[action.kind])
        line.append(" ")
    line.rstrip()
    return line


def _tick_numbers(section: range, margin: int, cell: int) -> str:
    """Numbers the ticks at a distance at which the numbers do not touch."""
    number_width = len(str(section[-1])) + 3
    apart = next(ticks for ticks in (1, 2, 5, 10, 20, 50, 100) if ticks * cell > number_width)
    line = "tick".ljust(margin)
    for tick in section:
        if tick % apart == 0:
            line = line.ljust(margin + (tick - section.start) * cell) + str(tick)
    return line
