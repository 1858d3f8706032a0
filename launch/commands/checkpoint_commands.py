"""Commands for checkpoints: `checkpoint inspect`, `checkpoint verify`, and `export`."""

import argparse
import json
from pathlib import Path

from .command import PLACE, RUN_HELP, TRAINED_HELP, Command, add, open_run, use_cpu_only

KINDS = ("safetensors", "npy")
"""A copy of KINDS in checkpoints/export.py, which is too slow to import for a help text."""
LORA = ("merged", "separate")
"""A copy of ADAPTERS there."""
HUGGING_FACE = "hugging_face"


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint`."""
    parser.add_argument("action", choices=("inspect", "verify"), help="show the contents, or compare the checksums")
    add(parser, "place", help=PLACE)
    add(parser, "--step", help="the checkpoint of this step (default: all; inspect shows the contents of the latest)")
    add(parser, "--json")


def checkpoint(arguments: argparse.Namespace) -> int:
    """Inspects or verifies the checkpoints of a run, or one checkpoint.

    Needs neither a device nor the model's code nor the mesh that saved the checkpoints.

    inspect lists the checkpoints with step, time and bytes on disk, including corrupt, unfinished and set-aside ones,
    and shows the contents of one: every array with its shape, dtype and bytes, the number of parameters, and the mesh
    and the versions that saved it. It does not read arrays.

    verify reads every array and compares it with the checksum that was computed before it was saved. It lists corrupt
    and missing arrays, and removes nothing. Exit code 0 if all checkpoints are complete, 2 if one is corrupt.

      spmdkit checkpoint inspect runs/quickstart --step 200
      spmdkit checkpoint verify runs/quickstart
    """
    from ...checkpoints.directory import find
    from ...checkpoints.inspect import inspect, text
    from ...checkpoints.integrity import summary, verify
    from ...mesh.exit_codes import FINISHED, INVALID_INPUT

    use_cpu_only()
    found = find(arguments.place, arguments.step)
    if arguments.action == "inspect":
        description = inspect(found)
        print(json.dumps(description, indent=2) if arguments.json else text(description))
        return FINISHED
    verdicts = []
    for verdict in verify(found):
        verdicts.append(verdict)
        if not arguments.json:
            print(verdict, flush=True)
    print(json.dumps([each.to_json() for each in verdicts], indent=2) if arguments.json else summary(verdicts))
    return FINISHED if all(each.is_whole for each in verdicts) else INVALID_INPUT


CHECKPOINT = Command("checkpoint", "spmdkit checkpoint verify runs/quickstart", checkpoint, add_checkpoint, RUN_HELP)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `export`."""
    add(parser, "place")
    parser.add_argument("target", metavar="FILE", help="FILE.safetensors, or a new directory of .npy files")
    add(parser, "overrides")
    text = "the format (default: from the name of FILE, or hugging_face for a run of that model)"
    parser.add_argument("--to", choices=(*KINDS, HUGGING_FACE), help=text)
    add(parser, "--step", "--ema")
    parser.add_argument("--whole-state", action="store_true", help="also write the optimizer's state, step and key")
    text = "merge low-rank adapters (default), or write them separately"
    parser.add_argument("--lora", choices=LORA, default=LORA[0], help=text)
    parser.add_argument("--force", action="store_true", help="replace an earlier export")


def export(arguments: argparse.Namespace) -> int:
    """Writes the parameters of a run for other programs.

    The target is one .safetensors file, or a directory of .npy files. Needs neither a device nor the model's code.
    Names are the paths of the parameters; blocks are in the model's order, stacked along dim 0. A module of Flax,
    Equinox or Keras has the names of that library, and its state (the statistics of batch norm) is included. Low-rank
    adapters are merged into the parameters that they adapt. Every array is compared with its checksum, and only a part
    of it is in memory at a time if its chunks allow that. --force replaces the files of an earlier export, and nothing
    else.

      spmdkit export runs/quickstart model.safetensors
      spmdkit export runs/quickstart model --to npy --step 200
      spmdkit export runs/tuned tuned

    A run of the model hugging_face is exported to a directory in the format of Hugging Face, unless FILE or --to
    selects another format. --to hugging_face does that for any model of the Llama, Qwen or GPT-2 families.
    transformers loads it: names and config.json are those of the family, and low-rank adapters are merged. This format
    loads the run, so it opens devices and accepts key=value; the other formats read no config except that of a CONFIG
    given as RUN.
    """
    if arguments.to == HUGGING_FACE:
        return _export_for_transformers(arguments)
    from ...checkpoints.export import add_suffix
    from ...checkpoints.export import export as run
    from ...checkpoints.restore import StoredCheckpoint
    from ...mesh.errors import UserError
    from ...runtime.loading.find_run import find_run

    found, config = find_run(arguments.place, arguments.step, arguments.overrides)
    target = add_suffix(arguments.to, Path(arguments.target))
    is_hugging_face = _is_hugging_face(found.run / "config.yaml")
    if is_hugging_face and arguments.to is None and not target.suffix:
        return _export_for_transformers(arguments)
    if arguments.overrides and config is None:
        raise UserError(
            f"spmdkit export of a directory takes RUN and FILE, got also {', '.join(map(repr, arguments.overrides))}. "
            f"Remove it, or add --to {HUGGING_FACE}, which reads the config. Quote a name with spaces."
        )
    use_cpu_only()
    names = ("whole_state", "lora", "ema", "force")
    print(run(StoredCheckpoint(found.one), target, **{name: getattr(arguments, name) for name in names}))
    if is_hugging_face:
        print(f"Names are those of spmdkit. For transformers: spmdkit export {arguments.place} DIRECTORY")
    return 0


def _is_hugging_face(path: Path) -> bool:
    """Returns True if the config in the directory of a run has a model of Hugging Face."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["name"] == HUGGING_FACE
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):  # the arrays are exported without a config
        return False


def _export_for_transformers(arguments: argparse.Namespace) -> int:
    """Writes a directory in the format of Hugging Face; this opens devices and loads the model's code."""
    from ...mesh.errors import UserError
    from ...runtime.loading.loaded_run import write_folder

    given = [f"--{name.replace('_', '-')}" for name in ("whole_state", "force") if getattr(arguments, name)]
    given += ["--lora separate"] if arguments.lora != LORA[0] else []
    if given:
        raise UserError(
            f"{given[0]} cannot be used with --to {HUGGING_FACE}, the default for a run of this model. Add --to npy, "
            "or remove it."
        )
    with open_run(arguments) as run:
        print(write_folder(run, Path(arguments.target)))
    return 0


EXPORT = Command("export", "spmdkit export runs/quickstart model.safetensors", export, add_export, TRAINED_HELP)
