"""`spmdkit export`: the parameters of a run as files that other programs read."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .command import OR_CONFIG, TRAINED_HELP, Command, add_ema, add_overrides, add_run, add_step

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("safetensors", "npy")
"""As in launch/inspection/export.py, which a help text cannot wait for."""
LORA = ("merged", "separate")
"""As ADAPTERS there."""
HUGGING_FACE = "hugging_face"


def add_export(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `export`."""
    add_run(parser, also=OR_CONFIG)
    parser.add_argument("target", metavar="FILE", help="FILE.safetensors, or a folder to be made, of .npy")
    add_overrides(parser)
    kinds = (*KINDS, HUGGING_FACE)
    parser.add_argument(
        "--to",
        choices=kinds,
        help="what is written; by default what the name of FILE says, or hugging_face for a run of that model",
    )
    add_step(parser, "the newest")
    add_ema(parser)
    parser.add_argument("--whole-state", action="store_true", help="the optimizer's state, step and key as well")
    parser.add_argument("--unstack", action="store_true", help="each block by itself: blocks/3/query")
    parser.add_argument(
        "--lora", choices=LORA, default=LORA[0], help="low-rank adapters: merged (the default), or separate beside them"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export")


def export(arguments: argparse.Namespace) -> int:
    """Writes the arrays of a checkpoint as files that other programs read."""
    from pathlib import Path

    if arguments.to == HUGGING_FACE:
        return _for_transformers(arguments)
    from ..finished.place import find_checkpoints, names_folder
    from ..inspection.export import export as run
    from ..inspection.export import named_for
    from ..inspection.stored import StoredCheckpoint

    found = find_checkpoints(arguments.place, arguments.step, arguments.overrides)
    target = named_for(arguments.to, Path(arguments.target))
    is_hugging_face = _is_hugging_face(found.run / "config.yaml")
    if is_hugging_face and arguments.to is None and not target.suffix:
        return _for_transformers(arguments)
    if names_folder(arguments.place):
        _refuse_more(arguments.overrides)
    names = ("whole_state", "unstack", "lora", "ema", "force")
    print(run(StoredCheckpoint(found.one), target, **{name: getattr(arguments, name) for name in names}))
    if is_hugging_face:
        print(f"Names are those of spmdkit. For transformers: spmdkit export {arguments.place} FOLDER")
    return 0


def _is_hugging_face(config: "Path") -> bool:
    """Reads from the config in the directory of a run whether its model is one of Hugging Face."""
    import yaml

    try:
        tree = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # it can be missing: the arrays are exported without it
        return False
    model = tree.get("model") if isinstance(tree, dict) else None
    return isinstance(model, dict) and model.get("name") == HUGGING_FACE


def _refuse_more(words: Sequence[str]) -> None:
    """Makes sure that nothing stands after FILE, where RUN is a folder: it would be lost without a word."""
    from ...mesh.errors import UserError
    from ..options import refuse_overrides

    refuse_overrides(words, "spmdkit export of a folder", f"Leave it out, or give --to {HUGGING_FACE}.")
    if words:
        raise UserError(
            f"spmdkit export of a folder takes RUN and FILE, and there is more: {', '.join(map(repr, words))}. Put a "
            "name with spaces into quotes, and leave out what is of neither."
        )


def _for_transformers(arguments: argparse.Namespace) -> int:
    """Writes a folder of Hugging Face; unlike the other kinds this opens devices, and the model's code."""
    from pathlib import Path

    from ...mesh.errors import UserError
    from ..finished.hugging_face_folder import write_folder
    from ..finished.load import loaded

    given = [name for name in ("whole_state", "unstack", "force") if getattr(arguments, name)]
    given += ["lora separate"] if arguments.lora != LORA[0] else []
    if given:
        default = "" if arguments.to else ", the default for a run of this model. Give --to npy, or leave it out"
        option = given[0].replace("_", "-")
        raise UserError(f"--{option} is not for --to {HUGGING_FACE}{default or '. Leave it out'}.")
    with loaded(arguments.place, arguments.step, arguments.overrides, ema=arguments.ema) as run:
        print(write_folder(run, Path(arguments.target)))
    return 0


COMMAND = Command(
    "export",
    "write the parameters of a run for other programs",
    "spmdkit export runs/quickstart model.safetensors",
    """
Writes the parameters of a run as one .safetensors file, or as a folder of .npy files. Needs no device, and not the
model's code. Names are the paths of the parameters; blocks come in the model's order, stacked along dim 0 or, with
--unstack, by themselves. A module of Flax, Equinox or Keras has the names of that library, and its state (the
statistics of batch norm) comes along. Low-rank adapters are merged into what they adapt. Every array is compared with
its checksum on the way, and no more than a part of one is held in memory where its chunks allow. --force replaces what
an earlier export wrote, and nothing else.

  spmdkit export runs/quickstart model.safetensors
  spmdkit export runs/quickstart model --to npy --step 200
  spmdkit export runs/tuned tuned

A run of the model hugging_face becomes a folder of Hugging Face, unless FILE or --to names another kind; --to
hugging_face writes one of any model of the Llama, Qwen or GPT-2 families. transformers loads it: names and config.json
are those of the family, and low-rank adapters are merged. Writing it loads the run, so it opens devices, and takes
key=value; the other kinds read no config but that of a CONFIG given as RUN.

`spmdkit checkpoint export` is the same.
""",
    add_export,
    export,
    TRAINED_HELP,
)
