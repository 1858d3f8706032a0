"""`spmdkit checkpoint`: looks at checkpoints, verifies them, and exports their arrays."""

import argparse
from collections.abc import Callable

from .command import RUN_HELP, TRAINED_HELP, Command, add_json, add_run, add_step
from .export import add_export, export

DAMAGED = 2


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `inspect`."""
    add_run(parser)
    add_step(parser, "all of the run, in short")
    add_json(parser)


def inspect(arguments: argparse.Namespace) -> int:
    """Prints which checkpoints a run has, or what one holds."""
    from ..inspection.finding import find
    from ..inspection.inspect import inspect as run
    from ..inspection.inspect import text

    description = run(find(arguments.place, arguments.step))
    print(_as_json(description) if arguments.json else text(description))
    return 0


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `verify`."""
    add_run(parser)
    add_step(parser, "all of the run, one after the other")
    add_json(parser)


def verify(arguments: argparse.Namespace) -> int:
    """Reads every array and compares its checksum; 2 where a checkpoint is damaged."""
    from ..inspection.finding import find
    from ..inspection.verify import summary
    from ..inspection.verify import verify as run

    verdicts = []
    for verdict in run(find(arguments.place, arguments.step)):
        verdicts.append(verdict)
        if not arguments.json:
            print(verdict, flush=True)
    print(_as_json([each.to_json() for each in verdicts]) if arguments.json else summary(verdicts))
    return 0 if all(each.is_whole for each in verdicts) else DAMAGED


def _as_json(value: object) -> str:
    import json

    return json.dumps(value, indent=2)


def _part(
    name: str,
    summary: str,
    example: str,
    text: str,
    add: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    help: str = RUN_HELP,
) -> Command:
    return Command(f"checkpoint {name}", summary, example, text, add, run, help)


PARTS = (
    _part(
        "inspect",
        "which checkpoints a run has, and what one holds",
        "spmdkit checkpoint inspect runs/quickstart",
        """
Lists the checkpoints of a run: step, time, bytes on disk, what is damaged, unfinished or set aside; and sums up the
newest. Of one checkpoint: every array with its shape, dtype and bytes, the number of parameters, the mesh and the
versions it was saved with. Reads no array.
""",
        add_inspect,
        inspect,
    ),
    _part(
        "verify",
        "read every array and compare its checksum",
        "spmdkit checkpoint verify runs/quickstart",
        """
Reads every array of every checkpoint of a run, or of one, and compares it with the checksum that was computed before it
was saved. Names what is damaged or missing, and removes nothing.

Ends with 0 where all are whole, 2 where one is damaged.
""",
        add_verify,
        verify,
    ),
    _part(
        "export",
        "write the parameters for other programs",
        "spmdkit checkpoint export runs/quickstart model.safetensors",
        """
Writes the parameters of a checkpoint, or its whole state, as one .safetensors file or as a folder of .npy files. Names
are the paths of the parameters; blocks are stacked, in the model's order, or by themselves with --unstack. Every array
is compared with its checksum on the way. --force replaces what an earlier export wrote, and nothing else.
""",
        add_export,
        export,
        TRAINED_HELP,
    ),
)


def add_part(parser: argparse.ArgumentParser) -> None:
    """Adds the word that chooses among the parts."""
    parser.add_argument("part", metavar="PART", help="one of those above; each has arguments of its own")


def run_part(arguments: argparse.Namespace) -> int:
    """Runs the part that the command line has found."""
    return arguments.part.run(arguments)


COMMAND = Command(
    "checkpoint",
    "look at checkpoints, verify and export them",
    "spmdkit checkpoint verify runs/quickstart",
    "\nLooks at the checkpoints of a run, without a device, the model's code or the mesh that saved them.\n\n"
    + "".join(f"  {part.example}\n      {part.summary}\n" for part in PARTS),
    add_part,
    run_part,
    "\n`spmdkit checkpoint PART --help` says more of a part.\n",
    PARTS,
)
