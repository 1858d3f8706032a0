"""report.html: one self-contained page that shows a run: losses, layouts, devices, memory, collectives, config."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...layouts.sizes import counted
from ...layouts.table import LayoutRow, LayoutTable
from ...mesh.device_mesh import DeviceMesh
from ..goodput import Goodput
from ..quantities import OWN_FIGURES, compact, loss_text
from .charts import Series, chart, points_of
from .costs import StepCosts, costs_sections
from .drawings import draw_array, draw_devices
from .goodput import goodput_section
from .layouts import layouts_section
from .page import page, visible
from .tiles import facts, references, tiles

MAX_DRAWINGS = 6
"""Arrays drawn: the largest of each layout."""


def write_report(
    path: Path,
    *,
    config: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    table: LayoutTable,
    mesh: DeviceMesh,
    summary: Mapping[str, Any],
    sample: str | None = None,
    costs: StepCosts | None = None,
    goodput: Goodput | None = None,
) -> None:
    """Writes the report of a run; the file is replaced as a whole.

    Args:
        path: The HTML file.
        config: The resolved config, plain data.
        metrics: The records of metrics.jsonl; any of them may be missing.
        table: The layouts of the parameters.
        mesh: The mesh they are on.
        summary: `title` and `status` head the page. `eval_loss` is the final one, `steps` and `seconds` say how long
            the training was, `flops_per_second` is the model's, `parameters` their number. Any other number whose name
            ends in `_loss`, such as `bigram_loss`, is a line to compare with. Other numbers become tiles, written as
            bytes or durations where the name has the word `bytes` or `seconds`. Words become a line each.
        sample: Text the model wrote; None or empty for none.
        costs: What the step holds and moves; None where that is not known.
        goodput: Where the time went; None where that is not known.
    """
    title = str(summary.get("title") or "spmdkit run")
    sections = [
        _head(title, mesh, summary),
        facts(summary),
        tiles(metrics, table, summary, costs.compiled.get("total") if costs else None),
        _charts(metrics, summary),
        goodput_section(goodput) if goodput else "",
        _sample(sample),
        _mesh(mesh, table),
        costs_sections(costs) if costs else "",
        layouts_section(table),
        _config(config),
        "<footer>Written by spmdkit. This page is one file and loads nothing.</footer>",
    ]
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(page(title, "\n".join(sections)).encode("utf-8", "replace"))
    beside.replace(path)


def _head(title: str, mesh: DeviceMesh, summary: Mapping[str, Any]) -> str:
    platforms = ", ".join(sorted({str(name).partition(":")[0] for name in mesh.devices.flat}))
    devices = counted(mesh.size, f"{platforms} device")
    sizes = " × ".join(f"{name} {size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1)
    parts = [
        str(summary.get("status") or ""),
        devices + (f": {sizes}" if sizes else ""),
    ]
    return f'<h1>{visible(title)}</h1><p class="lead">{visible(" · ".join(filter(None, parts)))}</p>'


def _charts(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    losses = [
        Series("training", points_of(metrics, "loss"), "train"),
        Series("evaluation", points_of(metrics, "eval_loss"), "eval"),
    ]
    large = chart("Loss", losses, references(summary), write=loss_text, height=320)
    small = [
        chart(name, [Series("", points_of(metrics, key))], write=write, height=130)
        for name, key, write in (
            ("Tokens per second", "tokens_per_second", compact),
            ("Gradient norm", "grad_norm", lambda value: f"{value:.3g}"),
            ("Learning rate", "learning_rate", lambda value: f"{value:.3g}"),
        )
    ]
    small += [_chart_of(name, metrics) for name in _models_own(metrics)]
    cards = "".join(f'<div class="card">{figure}</div>' for figure in small if figure)
    return (f'<div class="card">{large}</div>' if large else "") + f'<div class="charts">{cards}</div>'


def _models_own(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the model's own metrics, those of an evaluation by the name of training."""
    names = {name.removeprefix("eval_") for record in metrics for name in record if name not in OWN_FIGURES}
    return sorted(names)


def _chart_of(name: str, metrics: Sequence[Mapping[str, Any]]) -> str:
    series = [Series("training", points_of(metrics, name), "train")]
    series.append(Series("evaluation", points_of(metrics, f"eval_{name}"), "eval"))
    return chart(name, series, write=lambda value: f"{value:.3g}", height=130)


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


def _config(config: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100)
    key = '<details class="card"><summary>every key, resolved</summary>'
    return f"<h2>Config</h2>{key}<pre>{visible(text)}</pre></details>"
