"""report.html: one self-contained page that shows a run: its losses, layouts, devices, sample and config."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from ..layouts.paths import joined_path, numberless
from ..layouts.sizes import format_bytes
from ..layouts.table import LayoutRow, LayoutTable
from ..mesh.device_mesh import DeviceMesh
from .charts import Point, Reference, Series, chart
from .drawings import axis_hue, draw_array, draw_devices
from .page import page, visible
from .quantities import compact, duration, is_number, loss_text, with_unit

MAX_ROWS = 300
"""Rows of the layout table; the smallest beyond are only counted."""
MAX_DRAWINGS = 6
"""Arrays drawn: the largest of each layout."""
TILED = ("eval_loss", "seconds", "flops_per_second")
"""Keys of the summary with a tile of their own."""


class Tile(NamedTuple):
    """One number of the summary: its name, the number, and a remark in HTML."""

    name: str
    value: str
    remark: str = ""


def write_report(
    path: Path,
    *,
    config: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    table: LayoutTable,
    mesh: DeviceMesh,
    summary: Mapping[str, Any],
    sample: str | None,
) -> None:
    """Writes the report of a run; the file is replaced as a whole.

    Args:
        path: The HTML file.
        config: The resolved config, plain data.
        metrics: The records of metrics.jsonl; any of them may be missing.
        table: The layouts of the parameters.
        mesh: The mesh they are on.
        summary: `title` and `status` head the page. `eval_loss` is the final one, `seconds` the time trained,
            `flops_per_second` the model's; any other number whose name ends in `_loss`, such as `bigram_loss`, is a
            line to compare with; anything else is shown under its name.
        sample: Text the model wrote; None or empty for none.
    """
    title = str(summary.get("title") or "spmdkit run")
    sections = [
        _head(title, mesh, table, summary),
        _tiles(metrics, table, summary),
        _charts(metrics, summary),
        _sample(sample),
        _mesh(mesh, table),
        _layouts(table),
        _config(config),
        "<footer>Written by spmdkit. This page is one file and loads nothing.</footer>",
    ]
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(page(title, "\n".join(sections)).encode("utf-8", "replace"))
    beside.replace(path)


def _head(title: str, mesh: DeviceMesh, table: LayoutTable, summary: Mapping[str, Any]) -> str:
    platforms = ", ".join(sorted({str(name).partition(":")[0] for name in mesh.devices.flat}))
    sizes = " × ".join(f"{name} {size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1)
    parts = [
        str(summary.get("status") or ""),
        f"{compact(table.num_elements)} parameters",
        f"{mesh.size} {platforms} device(s)" + (f": {sizes}" if sizes else ""),
    ]
    return f'<h1>{visible(title)}</h1><p class="lead">{visible(" · ".join(filter(None, parts)))}</p>'


def _tiles(metrics: Sequence[Mapping[str, Any]], table: LayoutTable, summary: Mapping[str, Any]) -> str:
    tiles = [
        *_loss_tiles(metrics, summary),
        *_speed_tiles(metrics, summary),
        Tile("parameters per device", format_bytes(table.bytes_per_device), f"of {format_bytes(table.bytes_global)}"),
        *_other_tiles(summary),
    ]
    cells = "".join(
        f'<div class="card tile"><span>{visible(tile.name)}</span><b>{visible(tile.value)}</b>'
        f"<small>{tile.remark}</small></div>"
        for tile in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _loss_tiles(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[Tile]:
    tiles = []
    evaluations = _points(metrics, "eval_loss")
    final = summary.get("eval_loss", evaluations[-1][1] if evaluations else None)
    if is_number(final):
        tiles.append(Tile("evaluation loss", loss_text(final), "<br>".join(_compared(final, _references(summary)))))
    losses = _points(metrics, "loss")
    if losses:
        tiles.append(Tile("training loss", loss_text(losses[-1][1]), f"at step {losses[-1][0]:,.0f}"))
    return tiles


def _compared(loss: float, references: Iterable[Reference]) -> list[str]:
    """Says how far a loss is below or above others."""
    return [
        f'<span class="{"good" if loss < other.value else "bad"}">{abs(other.value - loss):.4f} '
        f"{'below' if loss < other.value else 'above'} {escape(other.name)} ({loss_text(other.value)})</span>"
        for other in references
    ]


def _speed_tiles(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[Tile]:
    speeds = [value for _, value in _points(metrics, "tokens_per_second")]
    steps = [value for _, value in _points(metrics, "seconds")]
    tiles = [Tile("tokens per second", compact(median(speeds)), "median")] if speeds else []
    tiles += [Tile("seconds per step", duration(median(steps)), "median")] if steps else []
    if is_number(summary.get("flops_per_second")):
        tiles.append(Tile("model FLOP/s", with_unit(summary["flops_per_second"], "FLOP/s"), "all devices together"))
    if is_number(summary.get("seconds")):
        tiles.append(Tile("time trained", duration(summary["seconds"])))
    return tiles


def _other_tiles(summary: Mapping[str, Any]) -> list[Tile]:
    known = {"title", "status", *TILED, *(f"{line.name}_loss".replace(" ", "_") for line in _references(summary))}
    return [Tile(name.replace("_", " "), _plain(value)) for name, value in summary.items() if name not in known]


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _references(summary: Mapping[str, Any]) -> list[Reference]:
    return [
        Reference(name.removesuffix("_loss").replace("_", " "), value)
        for name, value in summary.items()
        if name.endswith("_loss") and name != "eval_loss" and is_number(value)
    ]


def _charts(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    losses = [
        Series("training", _points(metrics, "loss"), "train"),
        Series("evaluation", _points(metrics, "eval_loss"), "eval"),
    ]
    large = chart("Loss", losses, _references(summary), write=loss_text, height=320)
    small = [
        chart(name, [Series("", _points(metrics, key))], write=write, height=130)
        for name, key, write in (
            ("Tokens per second", "tokens_per_second", compact),
            ("Gradient norm", "grad_norm", lambda value: f"{value:.3g}"),
            ("Learning rate", "learning_rate", lambda value: f"{value:.3g}"),
        )
    ]
    cards = "".join(f'<div class="card">{figure}</div>' for figure in small if figure)
    return (f'<div class="card">{large}</div>' if large else "") + f'<div class="charts">{cards}</div>'


def _points(metrics: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    return [
        (record["step"], record[key])
        for record in metrics
        if is_number(record.get("step")) and is_number(record.get(key))
    ]


def _sample(sample: str | None) -> str:
    return f'<h2>What the model writes</h2><div class="card"><pre>{visible(sample)}</pre></div>' if sample else ""


def _mesh(mesh: DeviceMesh, table: LayoutTable) -> str:
    if mesh.size == 1:
        return ""
    largest: dict[Any, LayoutRow] = {}
    for row in sorted(table.rows, key=lambda row: -row.bytes_global):
        split = tuple(row.layout.axes_of_dim(dim) for dim in range(len(row.shape)))
        largest.setdefault(split if any(split) else (), row)
    arrays = "".join(map(draw_array, list(largest.values())[:MAX_DRAWINGS]))
    return (
        "<h2>Which device holds what <small>the mesh, and the largest parameter of each layout, cut into its "
        f'parts</small></h2><div class="pieces">{draw_devices(mesh)}{arrays}</div>'
    )


def _layouts(table: LayoutTable) -> str:
    stacks = _stacks(table.rows)
    shown = sorted(stacks, key=_stack_bytes, reverse=True)[:MAX_ROWS] if len(stacks) > MAX_ROWS else stacks
    most = max(map(_stack_bytes, stacks), default=1) or 1
    lines = "".join(_layout_line(stack, most) for stack in shown)
    left_out = len(stacks) - len(shown)
    note = f" ({left_out} smaller rows are not shown)" if left_out else ""
    heads = "".join(f"<th{css}>{name}</th>" for name, css in LAYOUT_HEADS)
    return (
        "<h2>Layout of every parameter <small>click a heading to sort</small></h2>"
        f'<div class="card scroll"><table class="layouts"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>'
        f'<tfoot><tr><td colspan="4">{len(table.rows):,} arrays, {table.num_elements:,} elements, '
        f'{format_bytes(table.bytes_global)}{note}</td><td class="number">{format_bytes(table.bytes_per_device)}</td>'
        "</tr></tfoot></table></div>"
    )


LAYOUT_HEADS = (
    ("parameter", ""),
    ("shape and axes", ""),
    ("dtype", ""),
    ("rule", ""),
    ("per device", ' class="number"'),
)


def _stacks(rows: Iterable[LayoutRow]) -> list[list[LayoutRow]]:
    """Puts rows together that differ only in the numbers of their paths (the layers of a list of blocks)."""
    stacks: dict[Any, list[LayoutRow]] = {}
    for row in rows:
        stacks.setdefault((numberless(row.path), row.shape, str(row.dtype), row.rule, row.layout), []).append(row)
    return list(stacks.values())


def _stack_bytes(stack: Sequence[LayoutRow]) -> int:
    return sum(row.bytes_per_device for row in stack)


def _layout_line(stack: Sequence[LayoutRow], most: int) -> str:
    row, size = stack[0], _stack_bytes(stack)
    parts = prod(row.layout.parts_of_dim(dim) for dim in range(len(row.shape)))
    share = f"1/{parts} of {format_bytes(sum(row.bytes_global for row in stack))}" if parts > 1 else "all of it"
    return (
        f'<tr><td class="path">{escape(joined_path([row.path for row in stack]))}</td>'
        f'<td class="shape" data-sort="{sum(prod(row.shape) for row in stack)}">{_shape(row)}</td>'
        f'<td>{escape(str(row.dtype))}</td><td class="rule">{escape(row.rule)}</td>'
        f'<td class="number" data-sort="{size}">{format_bytes(size)}<small>{share}</small>'
        f'<i class="bar" style="width:{100 * size / most:.1f}%"></i></td></tr>'
    )


def _shape(row: LayoutRow) -> str:
    """The shape, each split dim followed by its axes and their sizes."""

    def axis(name: str) -> str:
        size = row.layout.mesh.axis_size(name)
        return f'<span class="axis" style="--h:{axis_hue(name)}">{escape(name)} ÷{size}</span>'

    dims = (" ".join([str(size), *map(axis, row.layout.axes_of_dim(dim))]) for dim, size in enumerate(row.shape))
    return " × ".join(dims) or "scalar"


def _config(config: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100)
    key = '<details class="card"><summary>every key, resolved</summary>'
    return f"<h2>Config</h2>{key}<pre>{visible(text)}</pre></details>"
