"""The folder of a run in place of a config: the config.yaml that the run left there, with that folder as run.dir.

    spmdkit train runs/one        as    spmdkit train runs/one/config.yaml run.dir=runs/one

A config.yaml of one's own makes no run of a folder: that of a run holds every section, or has beside it what training
leaves.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from .presets import preset_names
from .reading.keys import sections
from .reading.reader import read_text, read_yaml

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
LEFT = (CHECKPOINTS, "metrics.jsonl")
"""What training leaves first."""


def of_run_folder(source: str | Path, overrides: Sequence[str] = ()) -> tuple[str | Path, list[str]]:
    """Gives the config that is meant where a command is given the folder of a run.

    Args:
        source: What the command was given: a folder, a file or a preset.
        overrides: `key=value` each; they go before what the folder says.

    Returns:
        The config.yaml in the folder, and the overrides with run.dir before them; what was given where it is no such
        folder.
    """
    folder = Path(source)
    is_preset = folder.parent == Path() and folder.name in preset_names()
    if source == "" or is_preset or not is_run_folder(folder):
        return source, list(overrides)
    return folder / CONFIG, [f"run.dir={json.dumps(str(folder))}", *overrides]


def is_run_folder(folder: Path) -> bool:
    """Whether a folder holds the config.yaml of a run."""
    path = folder / CONFIG
    if not os.path.isfile(path):  # pathlib raises for a name that is too long
        return False
    if any(os.path.exists(folder / name) for name in LEFT):
        return True
    text, problems = read_text(path)
    value = None if problems else read_yaml(text).value
    return isinstance(value, dict) and {*sections()} <= {*value}


def run_of_checkpoint(folder: Path) -> Path | None:
    """The folder of the run that a folder of checkpoints, or one checkpoint, is in; None where it is none."""
    checkpoints = next((each for each in (folder, folder.parent) if each.name == CHECKPOINTS), None)
    if checkpoints is None or not is_run_folder(checkpoints.parent):
        return None
    return checkpoints.parent
