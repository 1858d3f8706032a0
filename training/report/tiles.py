"""The head figures of the report: a tile for each number, a line for each sentence."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from ...layouts.sizes import counted, format_bytes
from ...layouts.table import LayoutTable
from ..quantities import compact, duration, is_number, loss_text, speed_key, with_unit
from .charts import Reference
from .page import visible
from .points import points_of

SHOWN_OTHERWISE = ("title", "status", "steps", "eval_loss", "seconds", "flops_per_second", "parameters")
"""Keys of the summary that stand in the heading or have a tile of their own."""


class Tile(NamedTuple):
    """One number of the summary: its name, the number, and a remark in HTML."""

    name: str
    value: str
    remark: str = ""


def tiles(
    metrics: Sequence[Mapping[str, Any]], table: LayoutTable | None, summary: Mapping[str, Any], memory: int | None
) -> str:
    """Shows the numbers of a run.

    Args:
        metrics: The records of metrics.jsonl.
        table: The layouts of the parameters; None where they are not known.
        summary: See `write_report`.
        memory: Bytes that the compiled step needs on each device; None where that is not known.

    Returns:
        HTML.
    """
    shown = [
        *_loss_tiles(metrics, summary),
        *_speed_tiles(metrics, summary),
        *_size_tiles(table, summary, memory),
        *(_other_tile(name, value) for name, value in _others(summary) if _is_count(value)),
    ]
    cells = "".join(
        f'<div class="card tile"><span>{visible(tile.name)}</span><b>{visible(tile.value)}</b>'
        f"<small>{tile.remark}</small></div>"
        for tile in shown
    )
    return f'<section class="tiles">{cells}</section>'


def facts(summary: Mapping[str, Any]) -> str:
    """Shows what a run says of itself in words, one line each.

    Args:
        summary: See `write_report`.

    Returns:
        HTML; "" where it says nothing.
    """
    lines = "".join(
        f"<dt>{visible(_spoken(name))}</dt><dd>{visible(str(value))}</dd>"
        for name, value in _others(summary)
        if not _is_count(value) and value is not None and str(value)
    )
    return f'<dl class="facts">{lines}</dl>' if lines else ""


def references(summary: Mapping[str, Any]) -> list[Reference]:
    """Finds the losses to compare with, such as `bigram_loss`."""
    return [
        Reference(_spoken(name.removesuffix("_loss")), value)
        for name, value in summary.items()
        if name.endswith("_loss") and name != "eval_loss" and is_number(value)
    ]


def _loss_tiles(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[Tile]:
    found = []
    evaluations = points_of(metrics, "eval_loss")
    final = summary.get("eval_loss", evaluations[-1][1] if evaluations else None)
    if is_number(final):
        found.append(Tile("evaluation loss", loss_text(final), "<br>".join(_compared(final, references(summary)))))
    losses = points_of(metrics, "loss")
    if losses:
        found.append(Tile("training loss", loss_text(losses[-1][1]), f"at step {losses[-1][0]:,.0f}"))
    return found


def _compared(loss: float, others: Iterable[Reference]) -> list[str]:
    """Says how far a loss is below or above others."""
    return [
        f'<span class="{"good" if loss < other.value else "bad"}">{abs(other.value - loss):.4f} '
        f"{'below' if loss < other.value else 'above'} {visible(other.name)} ({loss_text(other.value)})</span>"
        for other in others
    ]


def _speed_tiles(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> list[Tile]:
    key = speed_key(metrics)
    speeds = [value for _, value in points_of(metrics, key)]
    steps = [value for _, value in points_of(metrics, "seconds")]
    found = [Tile(key.replace("_", " "), compact(median(speeds)), "median")] if speeds else []
    found += [Tile("time per step", duration(median(steps)), "median")] if steps else []
    if is_number(summary.get("flops_per_second")):
        found.append(Tile("model FLOP/s", with_unit(summary["flops_per_second"], "FLOP/s"), "all devices together"))
    if is_number(summary.get("seconds")):
        steps_done = summary.get("steps")
        remark = counted(int(steps_done or 0), "step") if is_number(steps_done) else ""
        found.append(Tile("time trained", duration(summary["seconds"]), remark))
    return found


def _size_tiles(table: LayoutTable | None, summary: Mapping[str, Any], memory: int | None) -> list[Tile]:
    parameters = summary.get("parameters", table.num_elements if table else None)
    held = f"{format_bytes(table.bytes_per_device)} on each device" if table else ""
    found = [Tile("parameters", _plain("parameters", parameters), held)] if _is_count(parameters) else []
    if memory is not None:
        found.append(Tile("memory per device", format_bytes(memory), "of the compiled step"))
    return found


def _others(summary: Mapping[str, Any]) -> list[tuple[str, Any]]:
    compared = [f"{line.name}_loss".replace(" ", "_") for line in references(summary)]
    return [(name, value) for name, value in summary.items() if name not in (*SHOWN_OTHERWISE, *compared)]


def _other_tile(name: str, value: Any) -> Tile:
    unit = next((unit for unit in ("bytes", "seconds") if unit in name.split("_")), "")
    bare = "_".join(word for word in name.split("_") if word != unit) or name
    return Tile(_spoken(bare), _plain(unit, value))


def _plain(unit: str, value: Any) -> str:
    """A number as people read it: bytes with a prefix, seconds as a duration, counts in threes."""
    if is_number(value) and value >= 0 and unit in WRITERS:
        return WRITERS[unit](value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}"


WRITERS = {"bytes": format_bytes, "seconds": duration}


def _is_count(value: Any) -> bool:
    """Whether a value is a number, finite or not, rather than words."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _spoken(name: str) -> str:
    return name.replace("_", " ")
