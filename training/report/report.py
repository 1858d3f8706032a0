"""report.html: one self-contained page that shows a run: losses, layouts, devices, memory, collectives, config."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...layouts.sizes import counted
from ...layouts.table import LayoutRow, LayoutTable
from ...mesh.device_mesh import DeviceMesh
from ..goodput import Goodput
from ..quantities import OWN_FIGURES, compact, loss_text, speed_key, three_digits
from .charts import Mark, Series, chart
from .costs import StepCosts, costs_sections
from .course import Course
from .drawings import draw_array, draw_devices
from .goodput import goodput_section
from .layouts import layouts_section
from .page import visible, write_page
from .points import points_of
from .samples import samples_section
from .tiles import facts, references, tiles

MAX_DRAWINGS = 6
"""Arrays drawn: the largest of each layout."""
FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_second": ("Tokens per second", compact),
    "rows_per_second": ("Rows per second", compact),
    "grad_norm": ("Gradient norm", three_digits),
    "learning_rate": ("Learning rate", three_digits),
}
"""Key of a record -> the title of its chart, and how its values are written."""


def write_report(
    path: Path,
    *,
    config: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    table: LayoutTable | None = None,
    mesh: DeviceMesh | None = None,
    summary: Mapping[str, Any],
    sample: str | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    costs: StepCosts | None = None,
    goodput: Goodput | None = None,
    course: Course | None = None,
) -> None:
    """Writes the report of a run; the file is replaced as a whole.

    Args:
        path: The HTML file.
        config: The resolved config, plain data.
        metrics: The records of metrics.jsonl; any of them may be missing.
        table: The layouts of the parameters; None where they are not known.
        mesh: The mesh they are on; None where it is not known.
        summary: `title` and `status` head the page. `eval_loss` is the final one, `steps` and `seconds` say how long
            the training was, `flops_per_second` is the model's, `parameters` their number. Any other number whose name
            ends in `_loss`, such as `bigram_loss`, is a line to compare with. Other numbers become tiles, written as
            bytes or durations where the name has the word `bytes` or `seconds`. Words become a line each.
        sample: Text the model wrote at its end; None or empty for none.
        samples: What it wrote on the way: `step` and `text` of each.
        costs: What the step holds and moves; None where that is not known.
        goodput: Where the time went; None where that is not known.
        course: The same over the time of the run, with its events; None where that is not known.
    """
    title = str(summary.get("title") or "spmdkit run")
    sections = [
        _head(title, mesh, summary),
        facts(summary),
        tiles(metrics, table, summary, costs.compiled.get("total") if costs else None),
        _charts(metrics, summary, course.marks if course else ()),
        goodput_section(goodput, course) if goodput else "",
        samples_section(sample, samples),
        _mesh(mesh, table) if mesh and table else "",
        costs_sections(costs) if costs else "",
        layouts_section(table) if table else "",
        _config(config),
    ]
    write_page(path, title, sections)


def _head(title: str, mesh: DeviceMesh | None, summary: Mapping[str, Any]) -> str:
    parts = [str(summary.get("status") or ""), devices_text(mesh) if mesh else ""]
    return f'<h1>{visible(title)}</h1><p class="lead">{visible(" · ".join(filter(None, parts)))}</p>'


def devices_text(mesh: DeviceMesh) -> str:
    """Says in words what a mesh is: "8 cpu devices: data 2 × fsdp 4"."""
    platforms = ", ".join(sorted({str(name).partition(":")[0] for name in mesh.devices.flat}))
    devices = counted(mesh.size, f"{platforms} device")
    sizes = " × ".join(f"{name} {size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1)
    return devices + (f": {sizes}" if sizes else "")


def _charts(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], marks: Sequence[Mark]) -> str:
    losses = [
        Series("training", points_of(metrics, "loss"), "train"),
        Series("evaluation", points_of(metrics, "eval_loss"), "eval"),
    ]
    large = chart("Loss", losses, references(summary), write=loss_text, height=320, marks=marks)
    small = [
        chart(name, [Series("", points_of(metrics, key))], write=write, height=130, marks=marks)
        for key, (name, write) in figures_of(metrics).items()
    ]
    small += [_chart_of(name, metrics, marks) for name in own_metrics(metrics)]
    cards = "".join(f'<div class="card">{figure}</div>' for figure in small if figure)
    return (f'<div class="card">{large}</div>' if large else "") + f'<div class="charts">{cards}</div>'


def figures_of(metrics: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, Callable[[float], str]]]:
    """Returns the figures to draw: of the two speeds the one to show.

    Args:
        metrics: The records of metrics.jsonl.
    """
    key = speed_key(metrics)
    return {name: figure for name, figure in FIGURES.items() if name == key or not name.endswith("_per_second")}


def own_metrics(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Gives the names of the model's own metrics, those of an evaluation by the name of training.

    Args:
        metrics: The records of metrics.jsonl.
    """
    names = {name.removeprefix("eval_") for record in metrics for name in record if name not in OWN_FIGURES}
    return sorted(names)


def _chart_of(name: str, metrics: Sequence[Mapping[str, Any]], marks: Sequence[Mark]) -> str:
    series = [Series("training", points_of(metrics, name), "train")]
    series.append(Series("evaluation", points_of(metrics, f"eval_{name}"), "eval"))
    return chart(name, series, write=three_digits, height=130, marks=marks)


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
