"""Commands for checkpoints: `checkpoint inspect`, `checkpoint verify`, and `export`."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .command import (
    OR_CONFIG,
    RUN_HELP,
    TRAINED_HELP,
    Command,
    add_ema,
    add_json,
    add_overrides,
    add_run,
    add_step,
    open_run,
    use_cpu_only,
)

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("safetensors", "npy")
"""A copy of KINDS in checkpoints/export.py, which is too slow to import for a help text."""
LORA = ("merged", "separate")
"""A copy of ADAPTERS there."""
HUGGING_FACE = "hugging_face"


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint inspect`."""
    add_run(parser)
    add_step(parser, "a summary of all")
    add_json(parser)


def inspect(arguments: argparse.Namespace) -> int:
    """Prints the checkpoints of a run, or the contents of one."""
    from ...checkpoints.directory import find
    from ...checkpoints.inspect import inspect as run
    from ...checkpoints.inspect import text

    use_cpu_only()
    description = run(find(arguments.place, arguments.step))
    print(_as_json(description) if arguments.json else text(description))
    return 0


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint verify`."""
    add_run(parser)
    add_step(parser, "all, one after the other")
    add_json(parser)


def verify(arguments: argparse.Namespace) -> int:
    """Reads every array and compares its checksum; returns 2 if a checkpoint is corrupt."""
    from ...checkpoints.directory import find
    from ...checkpoints.integrity import summary
    from ...checkpoints.integrity import verify as run
    from ...mesh.exit_codes import FINISHED, INVALID_INPUT

    use_cpu_only()
    verdicts = []
    for verdict in run(find(arguments.place, arguments.step)):
        verdicts.append(verdict)
        if not arguments.json:
            print(verdict, flush=True)
    print(_as_json([each.to_json() for each in verdicts]) if arguments.json else summary(verdicts))
    return FINISHED if all(each.is_whole for each in verdicts) else INVALID_INPUT


def _as_json(value: object) -> str:
    import json

    return json.dumps(value, indent=2)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `export`."""
    add_run(parser, also=OR_CONFIG)
    parser.add_argument("target", metavar="FILE", help="FILE.safetensors, or a new directory of .npy files")
    add_overrides(parser)
    parser.add_argument(
        "--to",
        choices=(*KINDS, HUGGING_FACE),
        help="the format (default: from the name of FILE, or hugging_face for a run of that model)",
    )
    add_step(parser, "the latest")
    add_ema(parser)
    parser.add_argument("--whole-state", action="store_true", help="also write the optimizer's state, step and key")
    parser.add_argument("--unstack", action="store_true", help="write each block separately: blocks/3/query")
    parser.add_argument(
        "--lora", choices=LORA, default=LORA[0], help="merge low-rank adapters (default), or write them separately"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export")


def export(arguments: argparse.Namespace) -> int:
    """Writes the arrays of a checkpoint to files for other programs."""
    from pathlib import Path

    if arguments.to == HUGGING_FACE:
        return _export_for_transformers(arguments)
    from ...checkpoints.export import add_suffix
    from ...checkpoints.export import export as run
    from ...checkpoints.restore import StoredCheckpoint
    from ...runtime.loading.find_run import find_checkpoints, names_folder

    found = find_checkpoints(arguments.place, arguments.step, arguments.overrides)
    target = add_suffix(arguments.to, Path(arguments.target))
    is_hugging_face = _is_hugging_face(found.run / "config.yaml")
    if is_hugging_face and arguments.to is None and not target.suffix:
        return _export_for_transformers(arguments)
    if names_folder(arguments.place):
        _reject_more(arguments.overrides)
    use_cpu_only()
    names = ("whole_state", "unstack", "lora", "ema", "force")
    print(run(StoredCheckpoint(found.one), target, **{name: getattr(arguments, name) for name in names}))
    if is_hugging_face:
        print(f"Names are those of spmdkit. For transformers: spmdkit export {arguments.place} DIRECTORY")
    return 0


def _is_hugging_face(config: "Path") -> bool:
    """Returns whether the config in the directory of a run has a model of Hugging Face."""
    import yaml

    try:
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # it may be missing: the arrays are exported without it
        return False
    model = tree.get("model") if isinstance(tree, dict) else None
    return isinstance(model, dict) and model.get("name") == HUGGING_FACE


def _reject_more(words: Sequence[str]) -> None:
    """Checks that no arguments follow FILE if RUN is a directory: they would be ignored."""
    from ...mesh.errors import UserError
    from .suggestions import reject_overrides

    reject_overrides(words, "spmdkit export of a directory", f"Remove it, or add --to {HUGGING_FACE}.")
    if words:
        raise UserError(
            f"spmdkit export of a directory takes RUN and FILE, got also {', '.join(map(repr, words))}. Quote a name "
            "with spaces, and remove other arguments."
        )


def _export_for_transformers(arguments: argparse.Namespace) -> int:
    """Writes a directory in the format of Hugging Face; this opens devices and loads the model's code."""
    from pathlib import Path

    from ...mesh.errors import UserError
    from ...runtime.loading.loaded_run import write_folder

    given = [name for name in ("whole_state", "unstack", "force") if getattr(arguments, name)]
    given += ["lora separate"] if arguments.lora != LORA[0] else []
    if given:
        default = "" if arguments.to else ", the default for a run of this model. Add --to npy, or remove it"
        option = given[0].replace("_", "-")
        raise UserError(f"--{option} cannot be used with --to {HUGGING_FACE}{default or '. Remove it'}.")
    with open_run(arguments) as run:
        print(write_folder(run, Path(arguments.target)))
    return 0


EXPORT = Command(
    "export",
    "write the parameters of a run for other programs",
    "spmdkit export runs/quickstart model.safetensors",
    """
Writes the parameters of a run to one .safetensors file, or to a directory of .npy files. Needs neither a device nor the
model's code. Names are the paths of the parameters; blocks are in the model's order, stacked along dim 0, or separate
with --unstack. A module of Flax, Equinox or Keras has the names of that library, and its state (the statistics of batch
norm) is included. Low-rank adapters are merged into the parameters that they adapt. Every array is compared with its
checksum, and only a part of it is in memory at a time if its chunks allow that. --force replaces the files of an
earlier export, and nothing else.

  spmdkit export runs/quickstart model.safetensors
  spmdkit export runs/quickstart model --to npy --step 200
  spmdkit export runs/tuned tuned

A run of the model hugging_face is exported to a directory in the format of Hugging Face, unless FILE or --to selects
another format. --to hugging_face does that for any model of the Llama, Qwen or GPT-2 families. transformers loads it:
names and config.json are those of the family, and low-rank adapters are merged. This format loads the run, so it opens
devices and accepts key=value; the other formats read no config except that of a CONFIG given as RUN.

`spmdkit checkpoint export` is the same.
""",
    add_export,
    export,
    TRAINED_HELP,
)
PARTS = (
    Command(
        "checkpoint inspect",
        "list the checkpoints of a run, and show the contents of one",
        "spmdkit checkpoint inspect runs/quickstart",
        """
Lists the checkpoints of a run with step, time and bytes on disk, including corrupt, unfinished and set-aside ones, and
summarizes the latest. For one checkpoint: every array with its shape, dtype and bytes, the number of parameters, and
the mesh and the versions that saved it. Does not read arrays.
""",
        add_inspect,
        inspect,
        RUN_HELP,
    ),
    Command(
        "checkpoint verify",
        "read every array and compare its checksum",
        "spmdkit checkpoint verify runs/quickstart",
        """
Reads every array of every checkpoint of a run, or of one, and compares it with the checksum that was computed before it
was saved. Lists corrupt and missing arrays, and removes nothing.

Exit code 0 if all checkpoints are complete, 2 if one is corrupt.
""",
        add_verify,
        verify,
        RUN_HELP,
    ),
    Command(
        "checkpoint export",
        EXPORT.summary,
        "spmdkit checkpoint export runs/quickstart model.safetensors",
        """
Writes the parameters of a checkpoint, or its whole state, to one .safetensors file or a directory of .npy files. Names
are the paths of the parameters; blocks are stacked, in the model's order, or separate with --unstack. Every array is
compared with its checksum. --force replaces the files of an earlier export, and nothing else.
""",
        add_export,
        export,
        TRAINED_HELP,
    ),
)


def add_part(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that selects a part of `checkpoint`."""
    parser.add_argument("part", metavar="PART", help="one of the parts above; each has its own arguments")


CHECKPOINT = Command(
    "checkpoint",
    "inspect, verify and export checkpoints",
    "spmdkit checkpoint verify runs/quickstart",
    "\nReads the checkpoints of a run, without a device, the model's code or the mesh that saved them.\n\n"
    + "".join(f"  {part.example}\n      {part.summary}\n" for part in PARTS),
    add_part,
    lambda arguments: arguments.part.run(arguments),
    "\n`spmdkit checkpoint PART --help` describes a part.\n",
    PARTS,
)
