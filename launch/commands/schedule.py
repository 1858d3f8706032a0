"""`spmdkit schedule`: draws and times a pipeline schedule before anything runs."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from .command import Command, add

if TYPE_CHECKING:
    from ...parallel.schedule.schedule_table import Schedule


def numbers(text: str) -> list[float]:
    """Parses numbers with commas in between."""
    return [float(number) for number in text.split(",")]


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `schedule`."""
    parser.add_argument("name", metavar="NAME", help="a schedule, or the path of your own CSV file")
    parser.add_argument("--stages", metavar="S", type=int, help="stages of the pipeline: strategy.pipe.size")
    parser.add_argument("--microbatches", metavar="M", type=int, help="microbatches of a batch, at least S")
    parser.add_argument("--virtual", metavar="V", type=int, help="chunks of the model on each stage")
    parser.add_argument("--recompute", action="store_true", help="compute each forward again for its backward")
    text = "costs of a stage's forward, backward to input, and backward to weights"
    parser.add_argument("--costs", metavar="F,B,W", type=numbers, default="1,1,1", help=text)
    parser.add_argument("--svg", metavar="FILE", help="also draw the schedule as an SVG file")
    parser.add_argument("--csv", metavar="FILE", help="also write the table of the schedule, to edit and read again")
    add(parser, "--json", help="print one JSON object instead of a drawing")


def schedule(arguments: argparse.Namespace) -> int:
    """Draws a pipeline schedule, and prints its time, bubble and memory.

    Draws the action of each stage at each tick. The costs are the time of a step, the share of it in which stages are
    idle, and the peak activations of each stage. Nothing is compiled, and no device is used.

      spmdkit schedule 1f1b --stages 4 --microbatches 8
      spmdkit schedule interleaved_1f1b --stages 4 --microbatches 8 --virtual 2   two chunks per stage: half the bubble
      spmdkit schedule zb_h1 --stages 4 --microbatches 8 --costs 1,1.2,0.8        measured costs
      spmdkit schedule zbv --stages 4 --microbatches 8 --svg zbv.svg              a picture
      spmdkit schedule gpipe --stages 4 --microbatches 8 --recompute --json       for a program to read
      spmdkit schedule 1f1b --stages 2 --microbatches 4 --csv mine.csv            the table, to edit
      spmdkit schedule mine.csv                                                   checked, timed and drawn

    schedules:
      gpipe             all forwards, then all backwards                    time 3(M+S-1)      holds M microbatches
      1f1b              one forward, one backward in turn                   time 3(M+S-1)      holds S-s on stage s
      interleaved_1f1b  1f1b with V chunks of the model on each stage       time 3(M+(S-1)/V)  holds S-s/V
      zb_h1             1f1b, each gradient passed on before its weights    time 3M+S-1        holds S
      zbv               two chunks per stage, down the stages and up again  time 3M+(S-1)/2    holds S

    An action is F (forward), R (forward again), B (backward to the input) or W (backward to the weights), and takes a
    tick. A tick lasts as long as its slowest action; with V chunks each action costs 1/V. In a CSV file, a line is a
    stage and a cell is a tick: F0, B3, W3, R2, F0.1 (microbatch 0, chunk 1), or empty. The file may begin with
    `# placement: v` and `# joint: true`.
    """
    from rich.console import Console

    from ...parallel.schedule.csv_file import csv_text
    from ...parallel.schedule.timing import measure, schedule_to_json, summarize
    from ...report.schedule_drawing import draw_svg, draw_text

    found, costs = _find_schedule(arguments), arguments.costs
    timing = measure(found, costs)
    if arguments.svg:
        Path(arguments.svg).write_text(draw_svg(found, costs), encoding="utf-8")
    if arguments.csv:
        Path(arguments.csv).write_text(csv_text(found), encoding="utf-8")
    if arguments.json:
        print(json.dumps(schedule_to_json(found, timing), indent=2))
        return 0
    console = Console(highlight=False)
    console.print(draw_text(found, console.width), soft_wrap=True)
    console.print(summarize(found, timing), soft_wrap=True)
    for path in filter(None, (arguments.svg, arguments.csv)):
        console.print(f"Wrote {path}.", soft_wrap=True)
    return 0


def _find_schedule(arguments: argparse.Namespace) -> "Schedule":
    from ...mesh.errors import UserError
    from ...parallel.schedule.builders import make_schedule
    from ...parallel.schedule.csv_file import read_schedule

    name, stages, microbatches = arguments.name, arguments.stages, arguments.microbatches
    if name.endswith(".csv"):
        if arguments.recompute:
            raise UserError(f"{name} lists its own recomputations: add R0, R1, ... to it, and remove --recompute.")
        return read_schedule(name, stages=stages, microbatches=microbatches, virtual=arguments.virtual)
    if stages is None or microbatches is None:
        make_schedule(name, 1, 1, virtual=None)  # an unknown name is reported first
        raise UserError(f"schedule {name} needs --stages and --microbatches; for example --stages 4 --microbatches 8.")
    return make_schedule(name, stages, microbatches, virtual=arguments.virtual, recompute=arguments.recompute)


COMMAND = Command("schedule", "spmdkit schedule 1f1b --stages 4 --microbatches 8", schedule, add_schedule, help="")
