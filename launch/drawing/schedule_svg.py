"""A pipeline schedule as a picture: one self-contained SVG, light or dark as its reader's system is.

Time runs to the right in units of the costs, and a tick is as wide as it lasts: where actions differ in length, the gap
after a short one is its wait for the slowest, hatched like all idle time. The curve under a stage is what it holds.
Pointing at an action names it.
"""

from collections.abc import Sequence
from html import escape
from itertools import accumulate
from typing import NamedTuple

from ...parallel.schedule.table import LETTERS, Action, Kind, Schedule
from ...parallel.schedule.timing import (
    UNIT_COSTS,
    action_lengths,
    live_activations,
    measure,
    peak_activations,
    tick_lengths,
)
from ...training.report.charts import ticks

NAMES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD_INPUT: "backward to input",
    Kind.BACKWARD_WEIGHT: "backward to weights",
}
WIDEST, NARROWEST = 1480, 640
"""Pixels of the whole timeline, as long as a tick is neither more than TICK wide nor less than THINNEST."""
TICK, THINNEST = 27, 4
"""Pixels of a tick."""
LEFT, RIGHT, TOP = 84, 92, 76
BAR, CURVE, PITCH = 28, 16, 56
"""Heights: of an action, of the curve under it, and from one stage to the next."""
LETTER_WIDTH = 6.4

STYLE = """
svg { --back: #ffffff; --ink: #1b2230; --dim: #667085; --line: #e4e7ec; --idle: #f4f5f7; --hatch: #dfe3e9;
  --F: #2f6fde; --R: #3f9fc4; --B: #dd7324; --W: #7a55c7; --held: #16794c; --on: #ffffff; color-scheme: light dark;
  font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --back: #12161d; --ink: #e6e9ef; --dim: #98a2b3; --line: #2a313d; --idle: #191f28; --hatch: #262d38;
    --F: #4d86ea; --R: #3f9ab8; --B: #d97a35; --W: #8e6bdb; --held: #5bd39a; }
}
text { fill: var(--ink); } .dim { fill: var(--dim); } .title { font-size: 18px; font-weight: 650; }
.label { font-size: 11px; text-anchor: middle; pointer-events: none; fill: var(--on); }
.pale { fill: var(--ink); } .end { text-anchor: end; } .middle { text-anchor: middle; }
.back { fill: var(--back); } .idle { fill: url(#hatch); } .grid { stroke: var(--line); }
.F { fill: var(--F); } .R { fill: var(--R); } .B { fill: var(--B); } .W { fill: var(--W); }
.held { fill: var(--held); fill-opacity: 0.18; stroke: var(--held); stroke-width: 1.2; }
rect.action:hover { stroke: var(--ink); stroke-width: 1.5; }
"""
HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="var(--idle)"/><rect width="1.5" height="6" fill="var(--hatch)"/></pattern>'
)


class _Frame(NamedTuple):
    """Where things go.

    Attributes:
        scale: Pixels per unit of time.
        ends: Time 0 and the time at the end of each tick.
        most: The most chunk-activations that any stage holds, as high as its curve may be.
    """

    scale: float
    ends: list[float]
    most: int

    def x(self, time: float) -> float:
        return LEFT + time * self.scale

    def y(self, stage: int) -> float:
        return TOP + stage * PITCH


def draw_svg(schedule: Schedule, costs: Sequence[float] = UNIT_COSTS) -> str:
    """Draws a schedule as it is run.

    Args:
        schedule: One that `check` accepts.
        costs: See `measure`.

    Returns:
        The text of an SVG file that needs no other.
    """
    ends = list(accumulate(tick_lengths(schedule, costs), initial=0.0))
    plot = max(min(TICK * schedule.num_ticks, WIDEST), THINNEST * schedule.num_ticks, NARROWEST)
    lives = [live_activations(schedule, stage) for stage in range(schedule.stages)]
    frame = _Frame(plot / ends[-1], ends, max(map(max, lives)))
    width, bottom = LEFT + plot + RIGHT, frame.y(schedule.stages)
    height = bottom + 78
    name = escape(title(schedule))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="name">',
        f'<title id="name">{name}</title><style>{STYLE}</style><defs>{HATCH}</defs>',
        f'<rect class="back" width="{width}" height="{height}" rx="10"/>',
        f'<text class="title" x="24" y="34">{name}</text>',
        f'<text class="dim" x="24" y="55">{escape(_figures(schedule, costs))}</text>',
        *_axis(frame, bottom),
        *(part for stage, live in enumerate(lives) for part in _stage(schedule, stage, live, costs, frame)),
        *_legend(schedule, bottom + 54),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def title(schedule: Schedule) -> str:
    """Names a schedule and its sizes."""
    chunks = f" of {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    return f"{schedule.name}: {schedule.stages} stages{chunks}, {schedule.microbatches} microbatches"


def _figures(schedule: Schedule, costs: Sequence[float]) -> str:
    timing = measure(schedule, costs)
    return (
        f"time {timing.time:.6g} · ideal {timing.ideal_time:.6g} · {timing.bubble:.1%} idle · at most "
        f"{max(peak_activations(schedule)):g} microbatches of activations on a stage · costs "
        f"{', '.join(f'{cost:g}' for cost in costs)}"
    )


def _axis(frame: _Frame, bottom: float) -> list[str]:
    parts = []
    for time in ticks(0, frame.ends[-1], 10):
        x = f"{frame.x(time):.2f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{bottom - 4}"/>')
        parts.append(f'<text class="dim middle" x="{x}" y="{bottom + 12}">{time:g}</text>')
    parts.append(f'<text class="dim end" x="{LEFT - 14}" y="{bottom + 12}">time</text>')
    return parts


def _stage(schedule: Schedule, stage: int, live: Sequence[int], costs: Sequence[float], frame: _Frame) -> list[str]:
    y, right = frame.y(stage), frame.x(frame.ends[-1])
    peak = max(live) / schedule.chunks
    parts = [
        f'<text class="end" x="{LEFT - 14}" y="{y + 18}">stage {stage}</text>',
        f'<rect class="idle" x="{LEFT}" y="{y}" width="{right - LEFT:.2f}" height="{BAR}" rx="3"/>',
    ]
    lengths = action_lengths(schedule, costs)
    for tick, action in enumerate(schedule.by_stage[stage]):
        if action is not None:
            parts.append(_action(schedule, action, tick, frame.ends[tick], lengths[action.kind], frame, y))
    parts.append(_curve(live, frame, y + BAR + 2 + CURVE))
    parts.append(f'<text class="dim" x="{right + 10:.2f}" y="{y + BAR + CURVE}">holds {peak:g}</text>')
    return parts


def _action(schedule: Schedule, action: Action, tick: int, start: float, length: float, frame: _Frame, y: float) -> str:
    letter = LETTERS[action.kind]
    width = length * frame.scale
    gap = min(1.0, width * 0.1)
    shade = 1 - 0.6 * action.chunk / max(1, schedule.chunks - 1)
    chunk = f", chunk {action.chunk}" if schedule.chunks > 1 else ""
    hint = f"{action}: {NAMES[action.kind]} of microbatch {action.microbatch}{chunk}; tick {tick}, time {start:g}"
    opacity = f' fill-opacity="{shade:.2f}"' if shade < 1 else ""
    rect = (
        f'<rect class="action {letter}" x="{frame.x(start) + gap / 2:.2f}" y="{y}" width="{width - gap:.2f}" '
        f'height="{BAR}" rx="{min(3.0, width / 5):.1f}"{opacity}>'
        f"<title>{hint}</title></rect>"
    )
    texts = (str(action), f"{letter}{action.microbatch}", str(action.microbatch))
    label = next((text for text in texts if len(text) * LETTER_WIDTH + 3 <= width), None)
    if label is None:
        return rect
    tone = "label pale" if shade < 0.7 else "label"
    return f'{rect}<text class="{tone}" x="{frame.x(start) + width / 2:.2f}" y="{y + 18}">{label}</text>'


def _curve(live: Sequence[int], frame: _Frame, bottom: float) -> str:
    """Draws in steps what is held in each tick."""
    path = [f"M{LEFT} {bottom}"]
    for tick, count in enumerate(live):
        if tick == 0 or count != live[tick - 1]:
            path.append(f"H{frame.x(frame.ends[tick]):.2f}V{bottom - CURVE * count / frame.most:.2f}")
    return f'<path class="held" d="{"".join(path)}H{frame.x(frame.ends[-1]):.2f}V{bottom}Z"/>'


def _legend(schedule: Schedule, y: float) -> list[str]:
    used = {action.kind for _, _, action in schedule.actions()}
    entries = [(LETTERS[kind], f"{LETTERS[kind]}  {name}") for kind, name in NAMES.items() if kind in used]
    if schedule.chunks > 1:
        entries.append(("F", "full to pale: first chunk to last"))
    entries += [("idle", "idle"), ("held", "activations held")]
    parts, x = [], float(LEFT)
    for style, text in entries:
        parts.append(f'<rect class="{style}" x="{x:.1f}" y="{y - 11}" width="14" height="14" rx="3"/>')
        parts.append(f'<text x="{x + 20:.1f}" y="{y}">{text}</text>')
        x += 44 + LETTER_WIDTH * len(text)
    return parts
