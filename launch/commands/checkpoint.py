"""`spmdkit checkpoint`: looks at checkpoints, checks them, compares them, takes them elsewhere, removes some."""

import argparse
import sys
from collections.abc import Callable

from .command import CONFIG_HELP, RUN_HELP, TRAINED_HELP, Command, add_config, add_json, add_run, add_step
from .export import add_export, export

DIFFERENT = 1
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


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `diff`."""
    add_run(parser, "first", "FIRST")
    add_run(parser, "second", "SECOND")
    parser.add_argument("--params", action="store_true", help="compare the parameters alone")
    add_json(parser)


def diff(arguments: argparse.Namespace) -> int:
    """Compares two checkpoints; 1 where they differ."""
    from ..inspection.diff import diff as run
    from ..inspection.finding import find
    from ..inspection.stored import StoredCheckpoint

    first, second = (StoredCheckpoint(find(place).one) for place in (arguments.first, arguments.second))
    found = run(first, second, only_parameters=arguments.params)
    print(_as_json(found.to_json()) if arguments.json else found)
    return DIFFERENT if found.found else 0


def add_prune(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `prune`."""
    add_run(parser)
    parser.add_argument("--keep", type=int, metavar="N", help="keep the newest N")
    parser.add_argument("--every", type=int, metavar="K", help="keep those whose step is a multiple of K")
    parser.add_argument("--leftovers", action="store_true", help="remove damaged-*, unfinished and half removed ones")
    parser.add_argument("--yes", action="store_true", help="remove them; without this they are listed only")


def prune(arguments: argparse.Namespace) -> int:
    """Lists what a rule removes, and removes it where that is confirmed."""
    from ...layouts.sizes import format_bytes
    from ..inspection.finding import find
    from ..inspection.prune import carry_out, plan

    planned = plan(find(arguments.place), keep=arguments.keep, every=arguments.every, leftovers=arguments.leftovers)
    print(planned, flush=True)
    if planned.removed and arguments.yes:
        print(f"removed {format_bytes(carry_out(planned, lambda line: print(line, file=sys.stderr, flush=True)))}")
    elif planned.removed:
        print("nothing is removed yet; the same command with --yes does it")
    return 0


def add_fits(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fits`."""
    add_run(parser)
    add_config(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step; by default the newest")
    add_json(parser)


def fits(arguments: argparse.Namespace) -> int:
    """Says whether a config could go on from a checkpoint; 2 where not."""
    from ...configs import load_config
    from ...layouts.sizes import counted, format_bytes
    from ...training.checkpointing.errors import CheckpointError
    from ...training.ending.exits import USER_MISTAKE
    from ..inspection.finding import find, shown
    from ..inspection.fits import check_fits
    from ..inspection.stored import StoredCheckpoint

    stored = StoredCheckpoint(find(arguments.place, arguments.step).one)
    config = load_config(arguments.config, arguments.overrides)
    try:
        found = check_fits(stored, config)
    except CheckpointError as error:
        if not arguments.json:
            raise
        print(_as_json({"folder": str(stored.folder), "fits": False, "why": str(error).splitlines()}))
        return USER_MISTAKE
    if arguments.json:
        print(_as_json({"folder": str(stored.folder), "fits": True, **found}))
        return 0
    saved, restored = (
        " x ".join(f"{axis} {size}" for axis, size in found[name].items()) or "1 device"
        for name in ("saved_on", "restored_on")
    )
    print(f"{shown(stored.folder)} fits: {counted(found['arrays'], 'array')}, {format_bytes(found['bytes'])}")
    print(f"  saved on the mesh {saved}; this config restores it on {restored}")
    return 0


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
        "diff",
        "how two checkpoints differ, array by array",
        "spmdkit checkpoint diff runs/one runs/two",
        """
Compares two checkpoints, of one run or of two, whatever meshes saved them: which arrays only one of them has, which
have another shape or dtype, and of the rest how many elements have other bits and by how much at most.

Ends with 0 where all is equal bit for bit, 1 where something differs, 2 where one cannot be read.
""",
        add_diff,
        diff,
    ),
    _part(
        "export",
        "write the parameters for other programs",
        "spmdkit checkpoint export runs/quickstart model.safetensors",
        """
Writes the parameters of a checkpoint, or its whole state, as one .safetensors or .npz file or as a folder of .npy
files. Names are the paths of the parameters; blocks are stacked, in the model's order, or by themselves with --unstack.
Every array is compared with its checksum on the way. What is there already is not replaced without --force.
""",
        add_export,
        export,
        TRAINED_HELP,
    ),
    _part(
        "prune",
        "remove checkpoints by rule, never the newest whole one",
        "spmdkit checkpoint prune runs/quickstart --keep 2",
        """
Removes the checkpoints of a run that no rule keeps: --keep N keeps the newest N, --every K those whose step is a
multiple of K. The newest that is whole always stays; to know it, it is read and compared with its checksums. Lists what
would go; --yes removes it. A directory that a job uses is refused.
""",
        add_prune,
        prune,
    ),
    _part(
        "fits",
        "could a config go on from a checkpoint?",
        "spmdkit checkpoint fits runs/quickstart my.yaml",
        """
Compares the arrays of a checkpoint with those that a run of a config would restore: what is missing, extra, or of
another shape or dtype. From shapes alone: no accelerator is opened and no step compiled.

Ends with 0 where it fits, 2 where not.
""",
        add_fits,
        fits,
        f"{RUN_HELP}{CONFIG_HELP}",
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
    "look at checkpoints, verify, compare, export, remove them",
    "spmdkit checkpoint verify runs/quickstart",
    "\nLooks at the checkpoints of a run, without a device, the model's code or the mesh that saved them.\n\n"
    + "".join(f"  {part.example}\n      {part.summary}\n" for part in PARTS),
    add_part,
    run_part,
    "\n`spmdkit checkpoint PART --help` says more of a part.\n",
    PARTS,
)
