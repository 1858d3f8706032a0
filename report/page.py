"""The report of one run and that of a plan: HTML pages in one file that load nothing. Templates escape every value."""

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
from ..mesh.files import absolute_path
from ..planning.run_plan import RunPlan
from ..planning.trace import COMPUTE, HOST, NETWORK, Event
from ..training.quantities import compact, duration, is_number, loss_text, speed_key, three_digits, with_unit
from .charts import Reference, Series, collect_points, make_chart
from .drawings import Cell, draw_array, draw_devices, draw_mesh, mesh_sizes
from .run_record import RunRecord, final_figures, own_metrics, seconds_trained
from .schedule_drawing import draw_svg
from .templates import write_page
from .time_course import Course, Stretch, make_timeline

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


QUEUE_KINDS = {COMPUTE: "step", HOST: "data", NETWORK: "save"}
"""Queue of a simulated step -> the color of report.css."""
WAITING = "lost"
MAX_ALTERNATIVES = 30
VERDICTS = {True: ("good", "fits"), False: ("bad", "does not fit"), None: ("", "may fit")}
"""Whether a plan fits -> the style and the text."""


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
    path = path or record.folder / REPORT
    facts = record.facts
    mesh = facts.table.mesh if facts else None
    samples = _choose_samples(record.samples)
    sample: Mapping[str, Any] | None = None
    if facts and facts.sample:
        sample = {"step": None, "text": facts.sample}
    elif samples:
        sample = samples.pop()
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
    devices = counted(mesh.size, f"{platforms} device")
    sizes = mesh_sizes(mesh)
    return f"{devices}: {sizes}" if sizes else devices


def make_tiles(record: RunRecord) -> list[Tile]:
    """Returns the numbers in the head of the page."""
    figures = final_figures(record)
    facts = record.facts
    trained = seconds_trained(record.metrics)
    losses = collect_points(record.metrics, "loss")
    tiles = []
    eval_loss = figures.get("eval_loss")
    if eval_loss is not None:
        comparisons = [_compare(eval_loss, reference) for reference in references(record)]
        tiles.append(Tile("evaluation loss", loss_text(eval_loss), comparisons))
    if losses:
        step, loss = losses[-1]
        tiles.append(Tile("training loss", loss_text(loss), [("", f"at step {step:,}")]))
    for key, (name, write, remark) in TILES.items():
        if key in figures:
            tiles.append(Tile(name, write(figures[key]), [("", remark)]))
    if trained is not None:
        tiles.append(Tile("time trained", duration(trained), [("", counted(record.step, "step"))]))
    if facts:
        held = f"{format_bytes(facts.table.bytes_per_device)} on each device"
        tiles.append(Tile("parameters", f"{facts.parameters:,}", [("", held)]))
    return tiles


def references(record: RunRecord) -> list[Reference]:
    """Returns the losses to compare with, such as `bigram_loss`."""
    if record.facts is None:
        return []
    losses = []
    for name, value in record.facts.figures.items():
        if name.endswith("_loss") and is_number(value):
            losses.append(Reference(name.removesuffix("_loss").replace("_", " "), value))
    return losses


def figures_of(metrics: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, Callable[[float], str]]]:
    """Returns the entries of `FIGURES` to draw, with only one of the two speeds."""
    speed = speed_key(metrics)
    return {key: figure for key, figure in FIGURES.items() if key == speed or not key.endswith("_per_second")}


def layout_rows(table: LayoutTable) -> dict[str, Any]:
    """Prepares the layout table: one row for the layers of a list of blocks, only the largest if there are too many."""
    stacks = stacks_of(table.rows)
    shown = largest(stacks, MAX_ROWS)
    rows = [_layout_row(stack) for stack in shown]
    return {"table": table, "rows": rows, "left_out": len(stacks) - len(shown)}


def _layout_row(stack: Sequence[LayoutRow]) -> dict[str, Any]:
    return {
        "path": joined_path([row.path for row in stack]),
        "first": stack[0],
        "elements": sum(prod(row.shape) for row in stack),
        "bytes": stack_bytes(stack),
        "whole": sum(row.bytes_global for row in stack),
    }


def _compare(loss: float, reference: Reference) -> tuple[str, str]:
    """Returns the style and the text of a comparison."""
    distance = f"{abs(reference.value - loss):.4f}"
    text = f"{reference.name} ({loss_text(reference.value)})"
    if loss < reference.value:
        return "good", f"{distance} below {text}"
    return "bad", f"{distance} above {text}"


def _charts(record: RunRecord) -> list[dict[str, Any] | None]:
    """Returns the large chart of the losses first, then the small charts."""
    metrics = record.metrics
    marks = record.course.events

    def both(key: str) -> list[Series]:
        evaluation = Series("evaluation", collect_points(metrics, f"eval_{key}"), "eval")
        return [Series("training", collect_points(metrics, key)), evaluation]

    large = make_chart("Loss", both("loss"), references(record), write=loss_text, height=320, marks=marks)
    small = []
    for key, (name, write) in figures_of(metrics).items():
        line = Series("", collect_points(metrics, key))
        small.append(make_chart(name, [line], write=write, height=130, marks=marks))
    for key in own_metrics(metrics):
        small.append(make_chart(key, both(key), write=three_digits, height=130, marks=marks))
    return [large, *filter(None, small)]


def _drawn_rows(table: LayoutTable) -> list[LayoutRow]:
    """Returns the largest parameter of each layout."""
    largest_of_layout: dict[Any, LayoutRow] = {}
    for row in sorted(table.rows, key=lambda row: -row.bytes_global):
        axes_of_dims = tuple(row.layout.axes_of_dim(dim) for dim in range(len(row.shape)))
        layout = axes_of_dims if any(axes_of_dims) else ()
        largest_of_layout.setdefault(layout, row)
    return list(largest_of_layout.values())[:MAX_DRAWINGS]


def _choose_samples(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns at most MAX_SAMPLES of the texts, evenly chosen, with the first and the last."""
    texts = []
    for sample in samples:
        if is_number(sample.get("step")) and isinstance(sample.get("text"), str):
            texts.append(sample)
    if len(texts) <= MAX_SAMPLES:
        return texts
    distance = (len(texts) - 1) / (MAX_SAMPLES - 1)
    return [texts[round(place * distance)] for place in range(MAX_SAMPLES)]


def write_plan_page(path: Path, plan: RunPlan, alternatives: Sequence[Mapping[str, Any]] = ()) -> None:
    """Writes the page of a plan; the file is replaced atomically.

    Args:
        path: The HTML file.
        plan: A plan; with events, its page has a picture of the step.
        alternatives: Ranked candidates with `strategy`, `step_seconds`, `peak_bytes`, `exposed_communication`, `bubble`
            and `reason`, as `SearchResult.to_json()["ranked"]` has them; the winner comes first.

    Raises:
        OSError: The file cannot be written.
    """
    names = plan.target.device_names()[: prod(plan.mesh.values())]
    mesh = DeviceMesh(tuple(plan.mesh.values()), tuple(plan.mesh), names)
    origin = "ANALYTIC, not compiled"
    if plan.compile_seconds is not None:
        origin = f"compiled in {plan.compile_seconds:.1f} s"
    memory = dict(plan.state)
    if plan.temporaries is not None:
        memory["temporaries"] = plan.temporaries
    memory["total"] = plan.peak_bytes
    memory["capacity"] = plan.target.card.memory_bytes
    kinds = [(kind, name) for name, kind in QUEUE_KINDS.items()]
    write_page(
        absolute_path(path),
        "plan_page.html",
        plan=plan,
        how=origin,
        tiles=_plan_tiles(plan),
        hosts=1 if plan.target.shape else plan.target.hosts,
        mesh={"text": f"{mesh_sizes(mesh) or 'one device'}: {mesh.size:,} devices", "mesh": _draw_hosts(plan, mesh)},
        axes=list(_axes_of_plan(plan)),
        memory=memory,
        queues=list(_queue_pictures(plan.events)),
        kinds=[*kinds, (WAITING, "kernels wait for a collective")],
        alternatives=[_alternative(candidate) for candidate in alternatives[:MAX_ALTERNATIVES]],
    )


def _plan_tiles(plan: RunPlan) -> list[Tile]:
    """Returns the figures in the head of the page of a plan; unknown ones are left out."""
    tiles = []
    timeline = plan.timeline
    if plan.step_seconds:
        origin = "simulated" if timeline else "bound of operations and bytes"
        tiles.append(Tile("time per step", duration(plan.step_seconds), [("", origin)]))
    if plan.tokens_per_second_per_device:
        tiles.append(Tile("tokens per second", compact(plan.tokens_per_second_per_device), [("", "of each device")]))
    if plan.mfu:
        tiles.append(Tile("model FLOP utilization", f"{plan.mfu:.1%}", [("", f"of the peak of {plan.dtype}")]))
    if timeline and timeline.exposed_share is not None:
        share = f"{timeline.exposed_share:.1%}"
        tiles.append(Tile("exposed communication", share, [("", "of all communication")]))
    if plan.bubble:
        tiles.append(Tile("pipeline bubble", f"{plan.bubble:.1%}"))
    tiles.append(Tile("memory per device", format_bytes(plan.peak_bytes), [VERDICTS[plan.fits]]))
    return tiles


def _draw_hosts(plan: RunPlan, mesh: DeviceMesh) -> dict[str, Any]:
    """Draws a mesh with the host of each device as its color; neighboring hosts have distant colors."""

    def cell(place: tuple[int, ...]) -> Cell:
        name = str(mesh.devices[place])
        number = name.partition("@")[0].rpartition(":")[2]
        host = plan.target.host_of(name)
        hue = None
        if plan.target.hosts > 1 and not plan.target.shape:
            hue = round(250 + 137.5 * host, 1) % 360
        return Cell(number, "", f"device {number}, host {host}", hue)

    return draw_mesh(mesh, cell, 16, 8)


def _axes_of_plan(plan: RunPlan) -> Iterable[dict[str, Any]]:
    """Yields the traffic over each axis of more than one device."""
    for name, size in plan.mesh.items():
        if size == 1:
            continue
        lines = [line for line in plan.traffic if name in line.axes]
        link = "host" if lines else "unused"
        if any(line.link == "network" for line in lines):
            link = "network"
        yield {
            "name": name,
            "size": size,
            "link": link,
            "bytes": sum(line.bytes for line in lines),
            "seconds": sum(line.least_seconds for line in lines),
        }


def _queue_pictures(events: Sequence[Event]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yields the name of each queue with events, and the picture of its time."""
    end = max((event.begin + event.seconds for event in events), default=0.0)
    for queue, kind_of_queue in QUEUE_KINDS.items():
        stretches = []
        for event in events:
            if event.queue != queue:
                continue
            kind = WAITING if event.name.startswith("waits for") else kind_of_queue
            stretches.append(Stretch(event.begin, event.begin + event.seconds, {kind: event.seconds}, 0))
        picture = make_timeline(Course([*stretches, Stretch(end, end, {}, 0)], []))
        if stretches and picture:
            yield queue, picture


def _alternative(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns a candidate of a search as texts."""
    axes = []
    for axis, value in row["strategy"].items():
        size = value["size"] if isinstance(value, Mapping) else value
        axes.append(f"{axis} {size}")
    details = [f"{key} {row[key]}" for key in ("accumulate", "remat") if key in row]
    return {
        "name": ", ".join([" × ".join(axes) or "one device", *details]),
        "step": duration(row["step_seconds"]) if row["step_seconds"] else "unknown",
        "memory": format_bytes(row["peak_bytes"]),
        "exposed": f"{row['exposed_communication'] or 0:.1%}",
        "bubble": f"{row['bubble']:.1%}",
        "reason": row.get("reason", "") or "fastest",
    }
