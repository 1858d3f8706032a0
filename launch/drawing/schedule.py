"""`spmdkit schedule`: a pipeline schedule drawn, timed and weighed, before anything runs."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ...mesh.errors import UserError
from ...parallel.schedule.builders import make_schedule
from ...parallel.schedule.csv_file import csv_text, read_schedule
from ...parallel.schedule.table import LETTERS, Action, Kind, Schedule
from ...parallel.schedule.timing import Timing, measure, peak_activations, peak_inputs
from ...training.ending.known_causes import OF_THE_MACHINE
from .schedule_svg import NAMES, draw_svg, title

STYLES = {
    Kind.FORWARD: "white on #2f6fde",
    Kind.RECOMPUTE: "black on #7fb2f0",
    Kind.BACKWARD_INPUT: "black on #f0a04b",
    Kind.BACKWARD_WEIGHT: "white on #7a5bc7",
}
IDLE = "."
MOST_PARTS = 4
"""Parts of a timeline that is wider than the terminal; of more, the first ones and the last are shown."""


def run(arguments: argparse.Namespace) -> int:
    """Prints a schedule, and writes the files that were asked for.

    Args:
        arguments: Those that `add_schedule` of cli.py adds.

    Returns:
        The exit code.

    Raises:
        UserError: The name, the sizes, the costs or a file do not work.
    """
    costs = _costs(arguments.costs)
    schedule = _schedule(arguments)
    timing = measure(schedule, costs)
    written = []
    if arguments.svg:
        written.append(_write(arguments.svg, draw_svg(schedule, costs)))
    if arguments.csv:
        written.append(_write(arguments.csv, csv_text(schedule)))
    if arguments.json:
        print(json.dumps(to_json(schedule, timing), indent=2))
        return 0
    console = Console(highlight=False)
    console.print(drawing(schedule, console.width), soft_wrap=True)
    console.print(summary(schedule, timing), soft_wrap=True)
    for path in written:
        console.print(f"Wrote {path}.", soft_wrap=True)
    return 0


def to_json(schedule: Schedule, timing: Timing) -> dict[str, Any]:
    """The figures of a schedule as plain values, for `--json`."""
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "virtual": schedule.chunks,
        **timing._asdict(),
        "peak_activations": peak_activations(schedule),
        "peak_inputs": peak_inputs(schedule),
    }


def drawing(schedule: Schedule, width: int) -> Text:
    """Draws a schedule: one line per stage, one cell per tick, in parts where it is wider than the terminal.

    Args:
        schedule: Any.
        width: Columns of the terminal.

    Returns:
        Text in colours, which reads the same without them.
    """
    cell = 1 + max((len(str(action)) for _, _, action in schedule.actions()), default=1)
    labels = [f"stage {stage}" for stage in range(schedule.stages)]
    margin = max(map(len, labels)) + 2
    across = max(5, (width - margin) // cell)
    text = Text(title(schedule) + "\n")
    starts = list(range(0, schedule.num_ticks, across))
    left_out = starts[MOST_PARTS - 1 : -1] if len(starts) > MOST_PARTS else []
    for start in starts:
        if start in left_out:
            if start == left_out[0]:
                text.append(f"\n... ticks {start} to {left_out[-1] + across - 1}; --svg FILE draws them all\n", "dim")
            continue
        ticks = range(start, min(start + across, schedule.num_ticks))
        text.append("\n").append(_axis(ticks, margin, cell), "dim")
        for label, actions in zip(labels, schedule.by_stage, strict=True):
            text.append("\n").append(_line(label.ljust(margin), actions[ticks.start : ticks.stop], cell))
        text.append("\n")
    return text.append("\n").append(_legend(schedule)).append("\n")


def summary(schedule: Schedule, timing: Timing) -> str:
    """Says in a few lines what a schedule costs."""
    rows = [
        ("time", f"{timing.time:.6g}", f"{timing.ticks} ticks, each as long as its slowest action"),
        ("ideal time", f"{timing.ideal_time:.6g}", "the same order, where no stage waits for a tick to end"),
        ("bubble", f"{timing.bubble:.1%}", "of the time, stages are idle"),
        ("peak activations", _listed(peak_activations(schedule)), "microbatches, stage by stage"),
    ]
    if any(peak_inputs(schedule)):
        rows.append(("peak inputs", _listed(peak_inputs(schedule)), "microbatches kept as a stage's input alone"))
    across = max(len(value) for _, value, _ in rows if len(value) <= 16)  # of many stages it may be longer
    return "\n".join(f"{name:<18}{value:<{across}}  {meaning}" for name, value, meaning in rows)


def _line(label: str, actions: Sequence[Action | None], cell: int) -> Text:
    line = Text(label)
    for action in actions:
        word, style = (IDLE, "dim") if action is None else (str(action), STYLES[action.kind])
        line.append(word.ljust(cell - 1), style).append(" ")
    line.rstrip()
    return line


def _schedule(arguments: argparse.Namespace) -> Schedule:
    name, stages, microbatches = arguments.name, arguments.stages, arguments.microbatches
    if name.endswith(".csv"):
        if arguments.recompute:
            raise UserError(f"{name} itself says what is recomputed: put R0, R1, ... in it, and leave --recompute out.")
        return read_schedule(name, stages=stages, microbatches=microbatches, virtual=arguments.virtual)
    if stages is None or microbatches is None:
        missing = " and ".join(
            option for option, value in (("--stages", stages), ("--microbatches", microbatches)) if value is None
        )
        make_schedule(name, 1, 1, virtual=None)  # an unknown name is told first
        raise UserError(f"schedule {name} needs {missing}; for example --stages 4 --microbatches 8.")
    return make_schedule(name, stages, microbatches, virtual=arguments.virtual, recompute=arguments.recompute)


def _costs(text: str) -> list[float]:
    try:
        return [float(cost) for cost in text.split(",")]
    except ValueError:
        raise UserError(
            f"--costs {text} are not numbers; give those of forward, backward to the input and backward to the "
            "weights, such as --costs 1,1.2,0.9."
        ) from None


def _write(path: str, text: str) -> str:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno in OF_THE_MACHINE:
            raise
        raise UserError(f"Cannot write {path}: {error.strerror}.") from error
    return path


def _axis(ticks: range, margin: int, cell: int) -> str:
    """Numbers every so many ticks, so that the numbers do not touch."""
    apart = next(apart for apart in (1, 2, 5, 10, 20, 50, 100) if apart * cell > len(str(ticks[-1])) + 3)
    line = "tick".ljust(margin)
    for tick in ticks:
        if tick % apart == 0:
            line = line.ljust(margin + (tick - ticks.start) * cell) + str(tick)
    return line


def _legend(schedule: Schedule) -> Text:
    text = Text()
    for kind in sorted({action.kind for _, _, action in schedule.actions()}, key=list(NAMES).index):
        text.append(LETTERS[kind], STYLES[kind]).append(f" {NAMES[kind]}  ")
    text.append(f"{IDLE} idle")
    if schedule.chunks > 1:
        text.append("\nF3 is microbatch 3 in chunk 0, F3.1 the same in chunk 1")
    return text


def _listed(numbers: Sequence[int | float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)
