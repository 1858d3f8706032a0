"""Drawings of a pipeline schedule: lines of text for a terminal, and one self-contained SVG.

In the SVG, time runs to the right in units of the costs, and a tick is as wide as it lasts. If actions differ in
length, the gap after a short one is its wait for the slowest, hatched like all idle time. The curve under a stage is
the number of activations that it holds. The tooltip of an action names it.
"""

from collections.abc import Sequence
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
MAX_WIDTH, MIN_WIDTH = 1480, 640
"""Pixels of the whole timeline, as long as a tick is neither more than TICK wide nor less than MIN_TICK."""
TICK, MIN_TICK = 27, 4
"""Pixels of a tick."""
LEFT, RIGHT, TOP = 84, 92, 76
BAR, CURVE, PITCH = 28, 16, 56
"""Heights: of an action, of the curve under it, and from one stage to the next."""
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
    scale, bottom = plot / ends[-1], TOP + schedule.stages * PITCH
    lives = [live_activations(schedule, stage) for stage in range(schedule.stages)]
    lengths, highest = action_lengths(schedule, costs), max(map(max, lives))

    def x(time: float) -> float:
        return round(LEFT + time * scale, 2)

    def draw_action(action: Action, tick: int) -> dict[str, Any]:
        letter, start, width = LETTERS[action.kind], ends[tick], lengths[action.kind] * scale
        gap = min(1.0, width * 0.1)
        chunk = f", chunk {action.chunk}" if schedule.chunks > 1 else ""
        labels = (str(action), f"{letter}{action.microbatch}", str(action.microbatch), "")
        return {
            "letter": letter,
            "x": round(x(start) + gap / 2, 2),
            "width": round(width - gap, 2),
            "round": round(min(3.0, width / 5), 1),
            "shade": round(1 - 0.6 * action.chunk / max(1, schedule.chunks - 1), 2),
            "hint": f"{action}: {NAMES[action.kind]} of microbatch {action.microbatch}{chunk}; "
            f"tick {tick}, time {start:g}",
            "label": next(text for text in labels if not text or len(text) * LETTER_WIDTH + 3 <= width),
            "middle": round(x(start) + width / 2, 2),
        }

    def draw_curve(live: Sequence[int], base: float) -> str:
        steps = [
            f"H{x(ends[tick])}V{base - CURVE * count / highest:.2f}"
            for tick, count in enumerate(live)
            if tick == 0 or count != live[tick - 1]
        ]
        return f"M{LEFT} {base}{''.join(steps)}H{x(ends[-1])}V{base}Z"

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
            stages=[
                {
                    "y": TOP + stage * PITCH,
                    "actions": [draw_action(action, tick) for tick, action in enumerate(actions) if action is not None],
                    "curve": draw_curve(live, TOP + stage * PITCH + BAR + 2 + CURVE),
                    "peak": f"{max(live) / schedule.chunks:g}",
                }
                for stage, (actions, live) in enumerate(zip(schedule.by_stage, lives, strict=True))
            ],
            legend=list(_place_legend(schedule)),
        )
        + "\n"
    )


def _place_legend(schedule: Schedule):
    entries = [(LETTERS[kind], f"{LETTERS[kind]}  {NAMES[kind]}") for kind in _used_kinds(schedule)]
    entries += [("F", "full to pale: first chunk to last")] * (schedule.chunks > 1)
    x = float(LEFT)
    for style, text in [*entries, ("idle", "idle"), ("held", "activations held")]:
        yield style, round(x, 1), text
        x += 44 + LETTER_WIDTH * len(text)


def _used_kinds(schedule: Schedule) -> list[Kind]:
    return sorted({action.kind for _, _, action in schedule.actions()}, key=list(NAMES).index)


def _stage_line(label: str, actions: Sequence[Action | None], cell: int) -> Text:
    line = Text(label)
    for action in actions:
        word, style = (IDLE, "dim") if action is None else (str(action), STYLES[action.kind])
        line.append(word.ljust(cell - 1), style).append(" ")
    line.rstrip()
    return line


def _tick_numbers(section: range, margin: int, cell: int) -> str:
    """Numbers the ticks at a distance at which the numbers do not touch."""
    apart = next(apart for apart in (1, 2, 5, 10, 20, 50, 100) if apart * cell > len(str(section[-1])) + 3)
    line = "tick".ljust(margin)
    for tick in section:
        if tick % apart == 0:
            line = line.ljust(margin + (tick - section.start) * cell) + str(tick)
    return line
