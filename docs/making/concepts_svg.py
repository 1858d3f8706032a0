"""The drawings of docs/concepts.md: a layout, a step and a run."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import product
from math import prod

import numpy as np
from spmdkit.parallel.plan import summed_elsewhere, unchanged
from spmdkit.parallel.sharding.strategies import STRATEGIES
from spmdkit.report.drawings import axis_hue, part_hue, part_name, parts_of_devices

from spmdkit import DeviceMesh, TensorLayout

from .svg import frame

STYLE = """.on { fill: #10151c; } .part { fill: oklch(76% 0.11 var(--h)); stroke: var(--back); }
.whole { fill: var(--all); stroke: var(--back); }
.arrow { stroke: var(--dim); stroke-width: 1.5; fill: none; marker-end: url(#tip); }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="var(--dim)"/></marker></defs>'
)
SHAPE = (512, 256)
LAYOUTS = ((None, None), ("fsdp", None), ("fsdp", "tensor"))
INSIDE = ("fsdp", "expert", "context", "tensor", "pipeline")
"""Strategies that act within forward and backward."""


def draw_layout() -> str:
    """One array under three layouts: cut into parts, and which device holds which."""
    mesh = DeviceMesh.of([f"cuda:{n}" for n in range(8)], fsdp=4, tensor=2)
    panels = [part for n, axes in enumerate(LAYOUTS) for part in _panel(TensorLayout(axes, mesh), 20 + 248 * n)]
    title = "One array under three layouts on a mesh of fsdp 4 x tensor 2: whole, in 4 parts, in 8 parts"
    return frame(764, 246, title, STYLE, panels)


def _panel(layout: TensorLayout, x: float) -> Iterable[str]:
    counts = [layout.parts_of_dim(dim) for dim in range(2)]
    parts = parts_of_devices(layout, 2).reshape(-1, 2)
    numbers = [int(np.ravel_multi_index(tuple(part), counts)) for part in parts]
    yield f'<text class="head" x="{x}" y="32">({", ".join(map(str, layout.axes))})</text>'
    yield f'<text class="dim" x="{x}" y="50">{SHAPE[0]} x {SHAPE[1]} {_in_parts(prod(counts))}</text>'
    tall, wide = 144 / counts[0], 84 / counts[1]
    for row, column in product(*map(range, counts)):
        part = int(np.ravel_multi_index((row, column), counts))
        yield from _part(x + column * wide, 66 + row * tall, wide, tall, part, prod(counts))
    for device, part in enumerate(numbers):
        yield from _part(x + 104 + device % 2 * 62, 66 + device // 2 * 37, 58, 33, part, prod(counts), f"{device}: ")
    yield f'<text class="dim" x="{x}" y="232">the array</text>'
    yield f'<text class="dim" x="{x + 104}" y="232">device: its part</text>'


def _in_parts(count: int) -> str:
    return f"in {count} parts" if count > 1 else "in one part"


def _part(x: float, y: float, wide: float, tall: float, part: int, count: int, before: str = "") -> Iterable[str]:
    hue = part_hue(part, count)
    style = 'class="whole"' if hue is None else f'class="part" style="--h: {hue:g}"'
    name = "all" if count == 1 else part_name(part, count)
    on = "" if hue is None else " on"
    yield f'<rect {style} x="{x:g}" y="{y:g}" width="{wide:g}" height="{tall:g}" rx="3"/>'
    yield f'<text class="middle{on}" x="{x + wide / 2:g}" y="{y + tall / 2 + 4.5:g}">{before}{name}</text>'


def draw_step() -> str:
    """The phases of a step, and the strategies that act in each, in the order in which they do."""
    idle = {unchanged, summed_elsewhere}
    files = {strategy.__name__.rpartition(".")[2]: strategy for strategy in STRATEGIES.values()}  # pyright: ignore

    def acting(phase: str) -> list[str]:
        return [name for name, strategy in files.items() if getattr(strategy, phase) not in idle]

    phases = (
        ("begin", "make whole", acting("begin")),
        ("microbatches", "forward, backward", INSIDE),
        ("finish", "scattered sums", acting("finish")),
        ("reduce", "the other sums", acting("reduce")),
        ("divide, clip", "by the weight", ()),
        ("update", "the optimizer", ("zero", "diloco")),
    )
    title = (
        "The phases of a step: begin, forward and backward of each microbatch, finish, reduce, divide and clip, update"
    )
    return frame(844, 200, title, STYLE, [TIP, *_boxes(phases, 20, 24, 124, 12)])


def draw_run() -> str:
    """What happens from a config to a report, and where a run goes on after it was stopped."""
    phases = (
        ("config", "mistakes, all at once", ("no device is opened",)),
        ("plan", "layouts, from shapes", ("no array exists",)),
        ("checks", "model and data", ("nothing is written",)),
        ("steps", "a compiled program", ("evaluate, save, log",)),
        ("end", "report, exit code", ("0, 2, 3 or 75",)),
    )
    parts = _boxes(phases, 20, 24, 144, 16)
    again = (
        '<path class="arrow" d="M572 106V134H252V109"/>'
        '<text class="dim middle" x="412" y="152">the same command resumes from the latest complete checkpoint, '
        "on any mesh</text>"
    )
    title = "A run: config, plan, checks, steps, end; the same command resumes from the latest checkpoint"
    return frame(824, 170, title, STYLE, [TIP, *parts, again])


def _boxes(phases: Sequence[tuple[str, str, Sequence[str]]], x: float, y: float, wide: float, gap: float) -> list[str]:
    """A row of cards joined by arrows: a heading, what it is, and lines of names."""
    tall = 62 + 19 * max(len(names) for _, _, names in phases)
    parts = []
    for number, (heading, words, names) in enumerate(phases):
        left = x + number * (wide + gap)
        parts.append(f'<rect class="card" x="{left}" y="{y}" width="{wide}" height="{tall}" rx="8"/>')
        parts.append(f'<text class="head" x="{left + 10}" y="{y + 24}">{escape(heading)}</text>')
        parts.append(f'<text class="dim" x="{left + 10}" y="{y + 43}">{escape(words)}</text>')
        for line, name in enumerate(names):
            parts.append(f'<text {_named(name)} x="{left + 10}" y="{y + 68 + 19 * line}">{escape(name)}</text>')
        if number:
            parts.append(f'<path class="arrow" d="M{left - gap} {y + 20}H{left - 1}"/>')
    return parts


def _named(name: str) -> str:
    strategy = next((strategy for strategy in STRATEGIES.values() if strategy.__name__.endswith(f".{name}")), None)  # pyright: ignore
    return f'class="code axis" style="--h: {axis_hue(strategy.AXIS)}"' if strategy else 'class="dim"'
