"""The report of one run: an HTML page in one file that loads nothing. Templates escape every value."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from markupsafe import Markup

from ..layouts.paths import joined_path
from ..layouts.sizes import counted, format_bytes
from ..layouts.table import LayoutRow, LayoutTable, largest, stack_bytes, stacks_of
from ..mesh.device_mesh import DeviceMesh
from ..training.quantities import compact, duration, is_number, loss_text, speed_key, three_digits, with_unit
from .charts import Reference, Series, collect_points, make_chart
from .drawings import draw_array, draw_devices, mesh_sizes
from .run_record import RunRecord, final_figures, own_metrics, seconds_trained
from .schedule_drawing import draw_svg
from .templates import write_page
from .time_course import make_timeline

REPORT = "report.html"
MAX_SAMPLES = 30
"""Generated texts on the page; of more, some from all stages of the run."""
MAX_DRAWINGS = 6
"""Drawn arrays: the largest of each layout."""
MAX_ROWS = 300
"""Rows of the layout table; smaller parameters are only counted."""
FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_second": ("Tokens per second", compact),
    "rows_per_second": ("Rows per second", compact),
    "grad_norm": ("Gradient norm", three_digits),
    "learning_rate": ("Learning rate", three_digits),
}
"""Key of a record -> the title of its chart, and the format of its values."""
TILES: dict[str, tuple[str, Callable[[float], str], str]] = {
    "tokens_per_second": ("tokens per second", compact, "median"),
    "rows_per_second": ("rows per second", compact, "median"),
    "seconds_per_step": ("time per step", duration, "median"),
    "flops_per_second": ("model FLOP/s", lambda value: with_unit(value, "FLOP/s"), "all devices together"),
    "predicted_bytes": ("memory per device", format_bytes, "of the compiled step"),
}
"""Key of a final figure -> the name, format and remark of its tile."""


class Tile(NamedTuple):
    """A number in the head of the page, with remarks that each may be "good" or "bad"."""

    name: str
    value: str
    remarks: Sequence[tuple[str, str]] = ()


def write_report(record: RunRecord, path: Path | None = None) -> Path:
    """Writes the report of a run; the file is replaced atomically.

    Args:
        record: The content of the run directory.
        path: The file; by default report.html in the run directory.

    Returns:
        The file.

    Raises:
        OSError: The file cannot be written.
    """
    path, facts = path or record.folder / REPORT, record.facts
    mesh = facts.table.mesh if facts else None
    samples = _choose_samples(record.samples)
    sample = {"step": None, "text": facts.sample} if facts and facts.sample else samples.pop() if samples else None
    write_page(
        path,
        "run_page.html",
        record=record,
        devices=describe_devices(mesh) if mesh else "",
        tiles=make_tiles(record),
        charts=_charts(record),
        timeline=make_timeline(record.course),
        sample=sample,
        samples=samples,
        mesh=draw_devices(mesh) if mesh and mesh.size > 1 else None,
        arrays=[draw_array(row) for row in _drawn_rows(facts.table)] if facts else [],
        picture=Markup(draw_svg(facts.costs.schedule)) if facts and facts.costs.schedule else "",
        layouts=layout_rows(facts.table) if facts else None,
        config=yaml.safe_dump(dict(record.config), sort_keys=False, allow_unicode=True, width=100),
    )
    return path


def describe_devices(mesh: DeviceMesh) -> str:
    """Describes a mesh, such as "8 cpu devices: data 2 × fsdp 4"."""
    platforms = ", ".join(sorted({str(name).partition(":")[0] for name in mesh.devices.flat}))
    devices, sizes = counted(mesh.size, f"{platforms} device"), mesh_sizes(mesh)
    return devices + (f": {sizes}" if sizes else "")


def make_tiles(record: RunRecord) -> list[Tile]:
    """Returns the numbers in the head of the page."""
    figures, facts, trained = final_figures(record), record.facts, seconds_trained(record.metrics)
    losses = collect_points(record.metrics, "loss")
    found = []
    if (loss := figures.get("eval_loss")) is not None:
        found.append(Tile("evaluation loss", loss_text(loss), [_compare(loss, each) for each in references(record)]))
    if losses:
        found.append(Tile("training loss", loss_text(losses[-1][1]), [("", f"at step {losses[-1][0]:,}")]))
    for key, (name, write, remark) in TILES.items():
        if key in figures:
            found.append(Tile(name, write(figures[key]), [("", remark)]))
    if trained is not None:
        found.append(Tile("time trained", duration(trained), [("", counted(record.step, "step"))]))
    if facts:
        held = f"{format_bytes(facts.table.bytes_per_device)} on each device"
        found.append(Tile("parameters", f"{facts.parameters:,}", [("", held)]))
    return found


def references(record: RunRecord) -> list[Reference]:
    """Returns the losses to compare with, such as `bigram_loss`."""
    figures = record.facts.figures if record.facts else {}
    return [
        Reference(name.removesuffix("_loss").replace("_", " "), value)
        for name, value in figures.items()
        if name.endswith("_loss") and is_number(value)
    ]


def figures_of(metrics: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, Callable[[float], str]]]:
    """Returns the entries of `FIGURES` to draw, with only one of the two speeds."""
    speed = speed_key(metrics)
    return {key: figure for key, figure in FIGURES.items() if key == speed or not key.endswith("_per_second")}


def layout_rows(table: LayoutTable) -> dict[str, Any]:
    """Prepares the layout table: one row for the layers of a list of blocks, only the largest if there are too many."""
    stacks = stacks_of(table.rows)
    shown = largest(stacks, MAX_ROWS)
    rows = [
        {
            "path": joined_path([each.path for each in stack]),
            "first": stack[0],
            "elements": sum(prod(each.shape) for each in stack),
            "bytes": stack_bytes(stack),
            "whole": sum(each.bytes_global for each in stack),
        }
        for stack in shown
    ]
    return {"table": table, "rows": rows, "left_out": len(stacks) - len(shown)}


def _compare(loss: float, other: Reference) -> tuple[str, str]:
    side, css = ("below", "good") if loss < other.value else ("above", "bad")
    return css, f"{abs(other.value - loss):.4f} {side} {other.name} ({loss_text(other.value)})"


def _charts(record: RunRecord) -> list[dict[str, Any] | None]:
    """Returns the large chart of the losses first, then the small charts."""
    metrics, marks = record.metrics, record.course.events

    def both(key: str) -> list[Series]:
        evaluation = Series("evaluation", collect_points(metrics, f"eval_{key}"), "eval")
        return [Series("training", collect_points(metrics, key)), evaluation]

    large = make_chart("Loss", both("loss"), references(record), write=loss_text, height=320, marks=marks)
    small = [
        make_chart(name, [Series("", collect_points(metrics, key))], write=write, height=130, marks=marks)
        for key, (name, write) in figures_of(metrics).items()
    ]
    small += [make_chart(key, both(key), write=three_digits, height=130, marks=marks) for key in own_metrics(metrics)]
    return [large, *filter(None, small)]


def _drawn_rows(table: LayoutTable) -> list[LayoutRow]:
    """Returns the largest parameter of each layout."""
    found: dict[Any, LayoutRow] = {}
    for row in sorted(table.rows, key=lambda row: -row.bytes_global):
        split = tuple(row.layout.axes_of_dim(dim) for dim in range(len(row.shape)))
        found.setdefault(split if any(split) else (), row)
    return list(found.values())[:MAX_DRAWINGS]


def _choose_samples(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns at most MAX_SAMPLES of the texts, evenly chosen, with the first and the last."""
    texts = [each for each in samples if is_number(each.get("step")) and isinstance(each.get("text"), str)]
    if len(texts) <= MAX_SAMPLES:
        return texts
    return [texts[round(place * (len(texts) - 1) / (MAX_SAMPLES - 1))] for place in range(MAX_SAMPLES)]
