"""One page that compares runs: their curves over each other, their figures and their configs side by side."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...layouts.sizes import counted, format_bytes
from ..goodput import Goodput
from ..quantities import compact, duration, is_number, loss_text, three_digits
from .charts import Series, chart, run_kind
from .goodput import goodput_bar, goodput_keys
from .page import visible, write_page
from .points import points_of
from .report import FIGURES, figures_of, own_metrics

MISSING = object()
"""The value of a key that the config of a run does not have."""
NONE = "–"
"""What stands where a run has no such figure."""


class ComparedRun(NamedTuple):
    """One of the runs.

    Attributes:
        name: What it is called on the page; no other run has this name.
        metrics: The records of its metrics.jsonl.
        figures: Its final figures by name, see `ROWS`; those of its own by any other name. None for none.
        goodput: Where its time went; None where that is not known.
    """

    name: str
    metrics: Sequence[Mapping[str, Any]]
    figures: Mapping[str, Any]
    goodput: Goodput | None = None


class Row(NamedTuple):
    """How a figure is shown.

    Attributes:
        name: What it is called.
        write: Writes its value.
        best: Picks the best of several values; None where none is better than another.
    """

    name: str
    write: Callable[[Any], str]
    best: Callable[..., Any] | None = None


ROWS: dict[str, Row] = {
    "step": Row("steps trained", "{:,}".format),
    "steps": Row("steps of the config", "{:,}".format),
    "loss": Row("training loss", loss_text, min),
    "eval_loss": Row("evaluation loss", loss_text, min),
    "best_eval_loss": Row("lowest evaluation loss", loss_text, min),
    "best_eval_step": Row("at step", "{:,}".format),
    "tokens_per_second": Row("tokens per second, median", compact, max),
    "rows_per_second": Row("rows per second, median", compact, max),
    "seconds_per_step": Row("time per step, median", duration, min),
    "flops_per_second": Row("model FLOP/s, median", compact, max),
    "seconds": Row("time in all", duration),
    "goodput": Row("goodput", lambda share: f"{100 * share:.1f} %", max),
    "starts": Row("starts", "{:,}".format),
    "parameters": Row("parameters", "{:,}".format),
    "devices": Row("devices", "{:,}".format),
    "predicted_bytes": Row("memory per device, predicted", format_bytes, min),
    "measured_bytes": Row("memory, measured", format_bytes),
    "collective_bytes": Row("collectives of a step", format_bytes, min),
}
"""Figure -> how the table shows it, in this order."""


def write_comparison(path: Path, runs: Sequence[ComparedRun], differences: Mapping[str, Sequence[Any]]) -> None:
    """Writes a page that compares runs; the file is replaced as a whole.

    Args:
        path: The HTML file.
        runs: At least two.
        differences: Key of the config -> its value in each run, `MISSING` where a run has no such key; only keys whose
            values differ.
    """
    title = f"{len(runs)} runs compared"
    sections = [
        f'<h1>{title}</h1><p class="lead runs">{"".join(map(_key, range(len(runs)), runs))}</p>',
        _remark(runs),
        _charts(runs),
        f"<h2>Final figures <small>the best of each in bold, also of several that tie</small></h2>{_figures(runs)}",
        _times(runs),
        _differences(runs, differences),
    ]
    write_page(path, title, sections)


def _key(number: int, run: ComparedRun) -> str:
    return f'<span class="key {run_kind(number)}">{visible(run.name)}</span> '


def _remark(runs: Sequence[ComparedRun]) -> str:
    steps = {run.figures.get("step") for run in runs}
    if len(steps) == 1:
        return ""
    told = ", ".join(f"{run.name} {run.figures.get('step') or 0:,}" for run in runs)
    return (
        f'<p class="note">They are not equally far: {visible(told)} steps. Final figures are those of their ends.</p>'
    )


def _charts(runs: Sequence[ComparedRun]) -> str:
    large = [
        _overlaid("Training loss", runs, "loss", loss_text, 320),
        _overlaid("Evaluation loss", runs, "eval_loss", loss_text, 240),
    ]
    shown = {key for run in runs for key in figures_of(run.metrics)}
    small = [_overlaid(title, runs, key, write) for key, (title, write) in FIGURES.items() if key in shown]
    own = sorted({name for run in runs for name in own_metrics(run.metrics)})
    for name in own:
        small += [
            _overlaid(name, runs, name, three_digits),
            _overlaid(f"{name}, evaluation", runs, f"eval_{name}", three_digits),
        ]
    wide = "".join(f'<div class="card">{figure}</div>' for figure in large if figure)
    cards = "".join(f'<div class="card">{figure}</div>' for figure in small if figure)
    return f'<div class="stack">{wide}</div><div class="charts">{cards}</div>'


def _overlaid(
    title: str, runs: Sequence[ComparedRun], key: str, write: Callable[[float], str], height: int = 150
) -> str:
    series = [Series(run.name, points_of(run.metrics, key), run_kind(number)) for number, run in enumerate(runs)]
    return chart(title, series, write=write, height=height)


def _figures(runs: Sequence[ComparedRun]) -> str:
    own = [name for run in runs for name in run.figures if name not in ROWS]
    rows = {**ROWS, **{name: Row(name, three_digits) for name in dict.fromkeys(own)}}
    lines = "".join(_figure_line(row, [run.figures.get(key) for run in runs]) for key, row in rows.items())
    return f'<div class="card scroll"><table class="compared">{_heads(runs, "figure")}{lines}</table></div>'


def _figure_line(row: Row, values: Sequence[Any]) -> str:
    numbers = [value for value in values if is_number(value)]
    if not numbers:
        return ""
    texts = [row.write(value) if is_number(value) else NONE for value in values]
    best = row.write(row.best(numbers)) if row.best and len(numbers) > 1 else None  # as shown: what looks alike ties
    tie = " <small>tie</small>" * (texts.count(best or "") > 1)
    cells = "".join(
        f"<td class=best>{visible(text)}{tie}</td>" if text == best else f"<td>{visible(text)}</td>" for text in texts
    )
    return f'<tr><th scope="row">{visible(row.name)}</th>{cells}</tr>'


def _heads(runs: Sequence[ComparedRun], first: str) -> str:
    names = "".join(
        f'<th scope="col"><span class="key {run_kind(number)}">{visible(run.name)}</span></th>'
        for number, run in enumerate(runs)
    )
    return f'<thead><tr><th scope="col">{first}</th>{names}</tr></thead>'


def _times(runs: Sequence[ComparedRun]) -> str:
    known = [(run, run.goodput) for run in runs if run.goodput]
    if not known:
        return ""
    bars = "".join(
        f'<h3>{visible(run.name)} <small class="note">goodput {100 * goodput.share:.1f} % of '
        f"{duration(goodput.total)}</small></h3>{goodput_bar(goodput)}"
        for run, goodput in known
    )
    keys = goodput_keys([goodput for _, goodput in known])
    return f'<h2>Where the time went</h2><div class="card goodput several">{bars}{keys}</div>'


def _differences(runs: Sequence[ComparedRun], differences: Mapping[str, Sequence[Any]]) -> str:
    if not differences:
        return '<h2>Configs</h2><p class="note">They are the same in every key.</p>'
    lines = "".join(
        f'<tr><th scope="row" class="path">{visible(key)}</th>{"".join(map(_value_cell, values))}</tr>'
        for key, values in differences.items()
    )
    return (
        f"<h2>Configs <small>{counted(len(differences), 'key')} of which the values differ</small></h2>"
        f'<div class="card scroll"><table class="compared values">{_heads(runs, "key")}{lines}</table></div>'
    )


def _value_cell(value: Any) -> str:
    return f"<td>{NONE if value is MISSING else visible(value_text(value))}</td>"


def value_text(value: Any) -> str:
    """Writes a value of a config in one line, as YAML does.

    Args:
        value: Plain data.
    """
    return (
        yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
        .removesuffix("\n")
        .removesuffix("\n...")
    )
