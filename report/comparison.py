"""The page that compares runs: their curves in the same charts, their figures and configs side by side."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..checkpoints.directory import display_path
from ..layouts.paths import flatten_mapping
from ..layouts.sizes import counted, format_bytes
from ..mesh.processes import unequal
from ..training.quantities import compact, duration, is_number, loss_text, three_digits
from .charts import Series, collect_points, make_chart, run_look
from .page import figures_of
from .run_record import RunRecord, final_figures, own_metrics
from .templates import write_page
from .time_course import NAMES

MISSING = object()
"""The value of a key that a config lacks."""
NONE = "–"
"""The text for a missing figure or key."""


class Row(NamedTuple):
    """A row of the table of figures.

    Attributes:
        name: The name of the figure.
        write: Formats a value.
        best: Picks the best of several values; None if no value is better than another.
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
    "seconds": Row("total time", duration),
    "goodput": Row("goodput", lambda share: f"{100 * share:.1f} %", max),
    "starts": Row("starts", "{:,}".format),
    "parameters": Row("parameters", "{:,}".format),
    "devices": Row("devices", "{:,}".format),
    "predicted_bytes": Row("memory per device, predicted", format_bytes, min),
    "measured_bytes": Row("memory, measured", format_bytes),
    "collective_bytes": Row("collectives of a step", format_bytes, min),
}
"""Figure -> its row, in the order of the table."""


def write_comparison(path: Path, records: Sequence[RunRecord]) -> None:
    """Writes a page that compares runs; the file is replaced atomically.

    Args:
        path: The HTML file.
        records: At least two runs in different directories.
    """
    names = short_names([record.folder for record in records])
    times = []
    lengths = []
    for name, record in zip(names, records, strict=True):
        lengths.append(f"{name} {record.step:,}")
        if record.goodput:
            times.append((name, record.goodput))
    have_same_length = len({record.step for record in records}) == 1
    kinds = []
    for kind, kind_name in NAMES.items():
        if any(goodput.seconds.get(kind) for _, goodput in times):
            kinds.append((kind, kind_name))
    differences = []
    for key, values in config_differences([record.config for record in records]).items():
        differences.append((key, [NONE if value is MISSING else value_text(value) for value in values]))
    write_page(
        path,
        "comparison.html",
        runs=[(name, *run_look(number)) for number, name in enumerate(names)],
        lengths="" if have_same_length else ", ".join(lengths),
        charts=_charts(names, records),
        figures=_figure_rows([final_figures(record) for record in records]),
        times=times,
        kinds=kinds,
        differences=differences,
    )


def comparison_json(records: Sequence[RunRecord], page: Path) -> dict[str, Any]:
    """Returns the content of a page for a program.

    Returns:
        `page`, `runs` (directory and figures of each run), `config_differences` (key -> a value for each run; None if
        the key is missing or null).
    """
    differences = {}
    for key, values in config_differences([record.config for record in records]).items():
        differences[key] = [None if value is MISSING else value for value in values]
    return {
        "page": str(page),
        "runs": [{"folder": str(record.folder), **final_figures(record)} for record in records],
        "config_differences": differences,
    }


def summarize(records: Sequence[RunRecord], page: Path) -> str:
    """Summarizes a page in a line for each run."""
    lines = []
    for record in records:
        figures = final_figures(record)
        parts = [f"step {record.step:,}"]
        if record.steps:
            parts[0] += f" of {record.steps:,}"
        for name in ("loss", "eval_loss"):
            if name in figures:
                parts.append(f"{ROWS[name].name} {loss_text(figures[name])}")
        lines.append(f"{display_path(record.folder)}: {', '.join(parts)}")
    if len(records) > 1:
        differences = config_differences([record.config for record in records])
        lines.append(f"{counted(len(differences), 'key')} of their configs differ: {', '.join(differences) or 'none'}")
    for record in records:
        if record.facts is None:
            lines.append(
                f"{display_path(record.folder)}: report.json is missing; layouts, memory and collectives are not shown."
            )
    return "\n".join([*lines, f"Wrote {display_path(page)}"])


def value_text(value: Any) -> str:
    """Returns a value of a config in one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")


def short_names(folders: Sequence[Path]) -> list[str]:
    """Names distinct absolute directories relative to their common parent."""
    common = Path(os.path.commonpath([folder.parent for folder in folders]))
    return [folder.relative_to(common).as_posix() for folder in folders]


def config_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Finds the keys with different values.

    Args:
        configs: Plain data: sections of keys.

    Returns:
        Key, as in key=value arguments -> its value in each config, `MISSING` if a config lacks it. A list is one
        value; `run.dir` is left out.
    """
    differences = unequal([flatten_mapping(config) for config in configs], MISSING)
    differences.pop("run.dir", None)
    return differences


def _charts(names: Sequence[str], records: Sequence[RunRecord]) -> list[dict[str, Any] | None]:
    """Returns the two large charts of the losses first, then the small charts."""

    def overlay(title: str, key: str, write: Callable[[float], str], height: int = 150) -> dict[str, Any] | None:
        series = []
        for number, (name, record) in enumerate(zip(names, records, strict=True)):
            color, is_dashed = run_look(number)
            series.append(Series(name, collect_points(record.metrics, key), color, is_dashed))
        return make_chart(title, series, write=write, height=height)

    figures: dict[str, tuple[str, Callable[[float], str]]] = {}
    metric_names: set[str] = set()
    for record in records:
        figures |= figures_of(record.metrics)
        metric_names.update(own_metrics(record.metrics))
    charts = [
        overlay("Training loss", "loss", loss_text, 320),
        overlay("Evaluation loss", "eval_loss", loss_text, 240),
    ]
    for key, (title, write) in figures.items():
        charts.append(overlay(title, key, write))
    for name in sorted(metric_names):
        charts.append(overlay(name, name, three_digits))
        charts.append(overlay(f"{name}, evaluation", f"eval_{name}", three_digits))
    return charts


def _figure_rows(figures: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[tuple[str, bool, bool]]]]:
    """Yields the name of each figure, and for each run its text, True if it is the best, and True if it ties."""
    rows = dict(ROWS)
    for figures_of_run in figures:
        for name in figures_of_run:
            rows.setdefault(name, Row(name, three_digits))
    for key, row in rows.items():
        values = [figures_of_run.get(key) for figures_of_run in figures]
        numbers = [value for value in values if is_number(value)]
        if not numbers:
            continue
        texts = [row.write(value) if is_number(value) else NONE for value in values]
        best = None
        if row.best is not None and len(numbers) > 1:
            best = row.write(row.best(numbers))  # compared as text: values that look the same tie
        ties = best is not None and texts.count(best) > 1
        yield row.name, [(text, text == best, text == best and ties) for text in texts]
