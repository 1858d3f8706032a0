"""Draws docs/pictures/mesh.svg, the picture of README: what each of 8 devices holds of a small model and its batch.

The layouts drawn are those that `spmdkit.lay_out` gives. `make figures` renews the file; a test holds it to this one.
"""

from html import escape
from math import prod

import jax
import numpy as np
from spmdkit.report.drawings import part_hue, parts_of_devices

import spmdkit

WIDTH, HEIGHT = 980, 372
FEATURES, HIDDEN, CLASSES, BATCH = 64, 512, 10, 256
SIZES = {"data": 2, "fsdp": 4}
CODE_X, GRID_X, GRID_Y = 28, 452, 74
CELL_WIDTH, CELL_HEIGHT, GAP = 112, 104, 14
STYLE = """
svg { --back: #ffffff; --ink: #1b2230; --dim: #667085; --line: #d5dae2; --card: #f6f7f9;
  --fsdp: #8a5a00; --data: #2357b8; color-scheme: light dark;
  font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --back: #12161d; --ink: #e6e9ef; --dim: #98a2b3; --line: #39424f; --card: #1a202a;
    --fsdp: #e2b04a; --data: #7fa8f5; }
}
text { fill: var(--ink); } .dim { fill: var(--dim); font-size: 11.5px; }
.head { font-size: 14px; font-weight: 650; } .middle { text-anchor: middle; }
.code { font: 12.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; }
.back { fill: var(--back); } .card { fill: var(--card); stroke: var(--line); }
.none { fill: none; stroke: var(--line); } .fsdp { fill: var(--fsdp); } .data { fill: var(--data); }
.edge { stroke-width: 1.5; } .edge.fsdp { fill: none; stroke: var(--fsdp); }
.edge.data { fill: none; stroke: var(--data); }
"""
TITLE = "A loss for one device, a mesh of data 2 x fsdp 4, and what each of its 8 devices holds"
CODE = (
    ("1  A loss for one device", ("def loss(params, batch, key):", "    ...", "    return sum, weight")),
    ("2  The mesh, in YAML", ("strategy: {fsdp: 4, data: 2}",)),
    ("3  Train, and prove it", ("$ spmdkit train my.yaml", "$ spmdkit verify my.yaml", "The same as on one device.")),
)


def layouts_drawn() -> spmdkit.LayoutTable:
    """The layouts of the parameters of README's model, on devices that need not be here."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        up, down = jax.random.split(key)
        return {"up": jax.random.normal(up, (FEATURES, HIDDEN)), "down": jax.random.normal(down, (HIDDEN, CLASSES))}

    model = spmdkit.Model(init=init, loss=lambda params, batch, key: (0.0, 1.0))
    mesh = spmdkit.DeviceMesh.of([f"cuda:{n}" for n in range(prod(SIZES.values()))], **SIZES)
    return spmdkit.lay_out(model, mesh).table


def draw() -> str:
    """Returns the text of the SVG."""
    table = layouts_drawn()
    places = [(row, column) for row in range(SIZES["data"]) for column in range(SIZES["fsdp"])]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-labelledby="name">',
        f'<title id="name">{TITLE}</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="10"/>',
        *_left(),
        f'<text class="head" x="{GRID_X}" y="34">8 devices, one compiled step</text>',
        *_axes(),
        *(part for row, column in places for part in _cell(table, row, column)),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _left() -> list[str]:
    """What its user writes: headings, each with a card of code."""
    parts, y = [], 34
    for heading, lines in CODE:
        parts.append(f'<text class="head" x="{CODE_X}" y="{y}">{escape(heading)}</text>')
        height = 19 * len(lines) + 14
        parts.append(f'<rect class="card" x="{CODE_X}" y="{y + 12}" width="308" height="{height}" rx="6"/>')
        for number, line in enumerate(lines):
            where = f'x="{CODE_X + 14}" y="{y + 32 + 19 * number}"'
            parts.append(f'<text class="code" xml:space="preserve" {where}>{escape(line)}</text>')
        y += height + 47
    return parts


def _place(row: int, column: int) -> tuple[int, int]:
    return GRID_X + column * (CELL_WIDTH + GAP), GRID_Y + row * (CELL_HEIGHT + GAP)


def _axes() -> list[str]:
    """The names of both mesh axes, along the sides that they run."""
    last_x, last_y = _place(SIZES["data"] - 1, SIZES["fsdp"] - 1)
    right, bottom = last_x + CELL_WIDTH, last_y + CELL_HEIGHT
    middle, left = (GRID_Y + bottom) / 2, GRID_X - 14
    return [
        f'<path class="edge fsdp" d="M{GRID_X} {GRID_Y - 10}H{right}"/>',
        f'<text class="fsdp" x="{GRID_X}" y="{GRID_Y - 17}">axis fsdp: shards of the parameters</text>',
        f'<path class="edge data" d="M{left} {GRID_Y}V{bottom}"/>',
        f'<text class="data middle" transform="rotate(-90 {left - 9} {middle})" x="{left - 9}" y="{middle}">'
        "axis data: copies</text>",
    ]


def _cell(table: spmdkit.LayoutTable, row: int, column: int) -> list[str]:
    """One device: the rows of the batch that it computes, and its part of each parameter."""
    x, y = _place(row, column)
    number = row * SIZES["fsdp"] + column
    each = BATCH // prod(SIZES.values())
    parts = [
        f'<rect class="card" x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="8"/>',
        f'<text x="{x + 10}" y="{y + 20}">device {number}</text>',
        f'<text class="dim" x="{x + 10}" y="{y + 37}">rows {number * each} to {number * each + each - 1}</text>',
    ]
    for line, name in enumerate(("up", "down")):
        layout = table.row(name).layout
        counts = [layout.parts_of_dim(dim) for dim in range(2)]
        held = parts_of_devices(layout, 2).reshape(-1, 2)[number]
        parts += _bar(x + 10, y + 49 + 26 * line, name, int(np.ravel_multi_index(held, counts)), prod(counts))
    return parts


def _bar(x: float, y: float, name: str, part: int, count: int) -> list[str]:
    """A parameter as a bar of its parts; the one that is held is filled."""
    width = 13.0
    left = x + 40
    cells = []
    for index in range(count):
        hue = part_hue(index, count)
        style = f'style="fill: oklch(72% 0.12 {hue:g})"' if index == part else 'class="none"'
        cells.append(f'<rect {style} x="{left + index * width:g}" y="{y}" width="{width:g}" height="15"/>')
    return [f'<text class="dim" x="{x}" y="{y + 12}">{name}</text>', *cells]


def _legend() -> list[str]:
    """What moves in a step."""
    y = _place(SIZES["data"] - 1, 0)[1] + CELL_HEIGHT + 28
    lines = (
        ("fsdp", "over fsdp: gather each parameter before use, reduce-scatter its gradient"),
        ("data", "over data: one all-reduce of the gradients"),
    )
    return [f'<text class="{axis}" x="{GRID_X}" y="{y + 20 * n}">{text}</text>' for n, (axis, text) in enumerate(lines)]
