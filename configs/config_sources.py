"""Sources of a config: a YAML file, the name of a preset, or the directory of a run.

The directory of a run stands for the config.yaml in it, with that directory as run.dir:

    spmdkit train runs/one        is        spmdkit train runs/one/config.yaml run.dir=runs/one
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..mesh.errors import SITE, UserError, did_you_mean
from ..mesh.files import check_local
from .config_errors import ConfigError
from .secret_variables import redact_config
from .yaml_reader import read_yaml

PRESETS = Path(__file__).parent / "presets"
CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
SCHEMA_URL = f"{SITE}schema.json"
"""The JSON schema of a config on the documentation site."""
SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA_URL}"
"""The first line of a config, with which editors complete keys and mark errors."""


def starter_text() -> str:
    """Returns the small config with comments that `spmdkit init` prints."""
    return (PRESETS.parent / "starter.yaml").read_text(encoding="utf-8")


def preset_names() -> list[str]:
    """Returns the names of the presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset_text(name: str) -> str:
    """Returns the file of a preset, given with or without `.yaml`, with its comments.

    Raises:
        ConfigError: The preset is unknown; suggests similar names.
    """
    names, stem = preset_names(), name.removesuffix(".yaml")
    if stem in names:
        return (PRESETS / f"{stem}.yaml").read_text(encoding="utf-8")
    near = did_you_mean(stem, names, count=3)
    raise ConfigError([f"unknown preset.{near} Presets: {', '.join(names)}."], name or "an empty name")


def describe_presets() -> str:
    """Returns the names of all presets with one line each, for `spmdkit train --list`."""
    names = preset_names()
    width = max(map(len, names))
    lines = [f"  {name:<{width}}  {preset_text(name).splitlines()[2].removeprefix('# ')}" for name in names]
    head = "Presets, each a complete config; `spmdkit init NAME > my.yaml` copies one to adapt:"
    return "\n".join([head, "", *lines, "", "start here: spmdkit train quickstart"]) + "\n"


def find_config(source: str | Path) -> Path:
    """Returns `source` if it is a file, otherwise the file of the preset with that name.

    Raises:
        ConfigError: The file or preset is unknown; suggests similar presets.
    """
    if source == "":  # Path("") is the working directory
        message = f"expected a YAML file, a preset or the directory of a run. Presets: {', '.join(preset_names())}."
        raise ConfigError([message], "an empty name")
    check_local(source, "CONFIG")
    path = Path(source)
    if os.path.isfile(path):  # unlike Path.is_file, returns False for a name that is too long
        return path
    preset = PRESETS / f"{path.name.removesuffix('.yaml')}.yaml"
    if path.parent == Path() and os.path.isfile(preset):
        return preset
    raise ConfigError([_explain_missing(path)], str(source))


def _explain_missing(path: Path) -> str:
    """Returns the reason that a path is not a config, and what to give instead."""
    names = preset_names()
    presets = f"Presets: {', '.join(names)}."
    try:
        path.stat()
    except (OSError, ValueError) as error:
        near = did_you_mean(path.name.removesuffix(".yaml"), names, count=3)
        reason = "" if isinstance(error, FileNotFoundError) else f": {getattr(error, 'strerror', error)}"
        return f"no such file or preset{reason}.{near} {presets}"
    if run := run_of_checkpoint(path):
        return (
            f"this directory contains checkpoints of the run {run}. To continue that run, give {run}; to start another "
            f"run from its parameters, give a config with another run.dir and checkpoint.start_from={path}."
        )
    kind = "this is a directory" if path.is_dir() else "not a regular file"
    return f"{kind}. Give the path of a YAML file, or a preset. {presets}"


def resolve_run_directory(source: str | Path, overrides: Sequence[str] = ()) -> tuple[str | Path, list[str]]:
    """Replaces the directory of a run by the config in it, with that directory as run.dir.

    Args:
        source: The argument of a command: a directory, a file or a preset.
        overrides: `key=value` arguments; they go before run.dir of the directory.

    Returns:
        The config.yaml and the overrides with run.dir before them, or the arguments as they are.
    """
    folder = Path(source)
    is_preset = folder.parent == Path() and folder.name in preset_names()
    if source == "" or is_preset or not is_run_directory(folder):
        return source, list(overrides)
    return folder / CONFIG, [f"run.dir={json.dumps(str(folder))}", *overrides]


def read_run_config(path: Path, remedy: str) -> dict[str, Any]:
    """Returns the plain values of the config.yaml of a run, without the values of secrets.

    Args:
        path: The file.
        remedy: The alternative to restoring a corrupt file, for the message.

    Raises:
        UserError: The file is not YAML, or not a mapping.
        OSError: It cannot be read.
    """
    try:
        document = read_yaml(path.read_text(encoding="utf-8"))
        wrong = "; ".join(problem.message for problem in document.problems)
    except UnicodeDecodeError as error:
        document, wrong = None, f"it is not valid UTF-8 ({error.reason})"
    if document and not wrong and isinstance(document.value, dict):
        return redact_config(document.value)
    wrong = wrong or "it is not a mapping of sections"
    raise UserError(f"{path} is not a valid config of a run: {wrong}. Restore it, {remedy}")


def is_run_directory(folder: Path) -> bool:
    """Returns whether a directory contains a run: a config.yaml, and output of training."""
    outputs = (CHECKPOINTS, "metrics.jsonl", "provenance.json")
    return os.path.isfile(folder / CONFIG) and any(os.path.exists(folder / name) for name in outputs)


def run_of_checkpoint(folder: Path) -> Path | None:
    """Returns the run directory of a checkpoint or of a directory of checkpoints, or None."""
    checkpoints = next((each for each in (folder, folder.parent) if each.name == CHECKPOINTS), None)
    return checkpoints.parent if checkpoints and is_run_directory(checkpoints.parent) else None
