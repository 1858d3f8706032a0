"""`spmdkit schedule`: draws and times a pipeline schedule."""

import argparse

from .command import Command

SCHEDULE_HELP = """
schedules:
  gpipe             all forwards, then all backwards                    time 3(M+S-1)      holds M microbatches
  1f1b              one forward, one backward in turn                   time 3(M+S-1)      holds S-s on stage s
  interleaved_1f1b  1f1b with V chunks of the model on each stage       time 3(M+(S-1)/V)  holds S-s/V
  zb_h1             1f1b, each gradient passed on before its weights    time 3M+S-1        holds S
  zbv               two chunks a stage, down the stages and up again    time 3M+(S-1)/2    holds S

An action is F (forward), R (forward again), B (backward to the input) or W (backward to the weights), and takes a tick.
A tick lasts as long as its slowest action; with V chunks each costs 1/V. In a CSV file a line is a stage and a cell a
tick: F0, B3, W3, R2, F0.1 (microbatch 0, chunk 1), or empty; `# placement: v` and `# joint: true` may stand on top.
"""


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `schedule`."""
    parser.add_argument("name", metavar="NAME", help="a schedule, or the path of a CSV file of your own")
    parser.add_argument("--stages", metavar="S", type=int, help="stages of the pipeline: strategy.pipe.size")
    parser.add_argument("--microbatches", metavar="M", type=int, help="microbatches of a batch, at least S")
    parser.add_argument("--virtual", metavar="V", type=int, help="chunks of the model on each stage")
    parser.add_argument("--recompute", action="store_true", help="compute each forward again for its backward")
    parser.add_argument(
        "--costs", metavar="F,B,W", default="1,1,1", help="of a stage's forward, backward to input, to weights"
    )
    parser.add_argument("--svg", metavar="FILE", help="draw it there as well")
    parser.add_argument("--csv", metavar="FILE", help="write its table there, to be changed and read again")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a drawing")


def schedule(arguments: argparse.Namespace) -> int:
    """Draws and times a pipeline schedule."""
    from ..drawing.schedule import run

    return run(arguments)


COMMAND = Command(
    "schedule",
    "draw a pipeline schedule; its time, bubble and memory",
    "spmdkit schedule 1f1b --stages 4 --microbatches 8",
    """
Draws which stage of a pipeline does what at each tick, and says what it costs: the time of a step, the share of it in
which stages are idle, and the most activations each stage holds at once. Nothing is compiled, no device is used.

  spmdkit schedule 1f1b --stages 4 --microbatches 8
  spmdkit schedule interleaved_1f1b --stages 4 --microbatches 8 --virtual 2      two chunks a stage: half the bubble
  spmdkit schedule zb_h1 --stages 4 --microbatches 8 --costs 1,1.2,0.8           costs that you have measured
  spmdkit schedule zbv --stages 4 --microbatches 8 --svg zbv.svg                 a picture
  spmdkit schedule gpipe --stages 4 --microbatches 8 --recompute --json          for a program to read
  spmdkit schedule 1f1b --stages 2 --microbatches 4 --csv mine.csv               the table, for you to change
  spmdkit schedule mine.csv                                                      checked, timed and drawn
""",
    add_schedule,
    schedule,
    SCHEDULE_HELP,
)
