"""The origin of a run beyond its config: its data, and the source of the user's own model and optimizer.

provenance.json is beside config.yaml. When a run continues, its content is compared with the current state. Other data
is an error: steps would train on examples that the run has not seen, or twice on the same ones. Other source code is a
warning, because the change may be intended.
"""

import ast
import hashlib
import importlib.util
import json
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax

from ..configs.config_text import as_plain
from ..data.source import Splits
from ..mesh.errors import UserError
from ..models.lora import lora_config
from .build_run import Built, data_facts

NAME = "provenance.json"
PACKAGES = ("spmdkit", "jax", "jaxlib", "orbax-checkpoint")
REMEDY = "set it back, choose another run.dir, or start anew with --fresh, which moves this run aside."


class Definition(NamedTuple):
    """The source of the user's own `module:function`; without files for what comes with spmdkit.

    Attributes:
        name: The name in the config.
        files: Module -> path and hash of its source: the module, and those beside it that it imports.
    """

    name: str
    files: Mapping[str, tuple[str, str]] = {}


class Provenance(NamedTuple):
    """The origin of a run.

    Attributes:
        fingerprint: The fingerprint of the data, see `Splits`; "" if unknown.
        description: The description of the data.
        model: The model.
        optimizer: The user's own optimizer if there is one, otherwise the first.
    """

    fingerprint: str
    description: str
    model: Definition
    optimizer: Definition


def provenance_of(built: Built) -> Provenance:
    """Returns the origin of a run that is ready to start."""
    names = built.config.optimizer.names
    return Provenance(
        fingerprint=built.splits.fingerprint,
        description=built.splits.description,
        model=find_definition(str(built.config.model["name"])),
        optimizer=find_definition(next((name for name in names if ":" in name), names[0])),
    )


def find_definition(name: str) -> Definition:
    """Returns the definition of a name in a config."""
    return Definition(name, dict(_sources(name.partition(":")[0])) if ":" in name else {})


def to_json(found: Provenance) -> str:
    """Returns the content of provenance.json."""
    definitions = {name: getattr(found, name)._asdict() for name in ("model", "optimizer")}
    return json.dumps({**found._asdict(), **definitions}, indent=2) + "\n"


def read_provenance(folder: Path) -> Provenance | None:
    """Reads provenance.json from a run directory; None if it is missing.

    Raises:
        UserError: The file is corrupt.
    """
    path = folder / NAME
    try:
        fields = json.loads(path.read_bytes())
        model, optimizer = (
            Definition(each["name"], {name: (str(file), str(hashed)) for name, (file, hashed) in each["files"].items()})
            for each in (fields["model"], fields["optimizer"])
        )
        return Provenance(**{**fields, "model": model, "optimizer": optimizer})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is corrupt: {type(error).__name__}: {error}. Restore it, or remove it: this run then continues "
            "without comparing its data and its model."
        ) from error


def check_data(folder: Path, before: Provenance, now: Provenance) -> None:
    """Compares the data of a run with its earlier data.

    Raises:
        UserError: The data is different.
    """
    if before.fingerprint and now.fingerprint and before.fingerprint != now.fingerprint:
        raise UserError(
            f"{folder} holds a run on other data: the contents, names or number of its examples, their length, or the "
            "split have changed.\n"
            f"  then: {before.description} (fingerprint {before.fingerprint})\n"
            f"  now:  {now.description} (fingerprint {now.fingerprint})\n"
            "Restore the old data to continue, choose another run.dir, or start anew with --fresh, which moves this "
            "run aside."
        )


def remarks(before: Provenance | None, now: Provenance, source: str, *, goes_on: bool) -> list[str]:
    """Returns messages about a run that starts or continues.

    Args:
        before: The earlier origin of the run; None for a new run, or if provenance.json is missing.
        now: The current origin.
        source: `data.source`.
        goes_on: Whether the run continues from a checkpoint.

    Returns:
        Lines; those that require an action begin with "warning: ".
    """
    lines = []
    if not now.fingerprint:
        lines.append(
            f"warning: data.source={source} does not give a fingerprint: if its data changes, a resumed run will not "
            "notice. Set Splits.fingerprint to a string that changes with the data (spmdkit.data.fingerprint makes "
            "one)."
        )
    if before is None:
        missing = f"{NAME} is missing: data and model cannot be compared with those of the run."
        return [*lines, missing] if goes_on else lines
    for key in ("model", "optimizer"):
        definition = getattr(now, key)
        if changed := changed_files(getattr(before, key), definition):
            lines.append(
                f"warning: {key}.name={definition.name}: {changed} changed since this run was made, and may compute "
                f"something else. If that is not intended, {REMEDY}"
            )
    return lines


def changed_files(before: Definition, now: Definition) -> str:
    """Returns the files with a different source, with their verb; "" if there are none."""
    names = [*now.files, *(name for name in before.files if name not in now.files)]
    hashes = [{name: hashed for name, (_, hashed) in each.files.items()} for each in (before, now)]
    paths = [{**before.files, **now.files}[name][0] for name in names if hashes[0].get(name) != hashes[1].get(name)]
    return f"{', '.join(paths)} {'has' if len(paths) == 1 else 'have'}" if paths else ""


def changed_data(folder: Path, splits: Splits) -> str:
    """Returns a message if data is not that of a run, otherwise "".

    Args:
        folder: The run directory.
        splits: The data that its config names now.

    Raises:
        UserError: provenance.json is corrupt.
    """
    before = read_provenance(folder)
    if before is None or not before.fingerprint or not splits.fingerprint or before.fingerprint == splits.fingerprint:
        return ""
    return (
        f"The data is not what the run in {folder} was made of: then {before.description}, now {splits.description}. "
        "Its evaluation split may hold rows that the run was trained on. Restore the old data, or name other data with "
        "data.eval_files."
    )


def changed_model(folder: Path, name: str) -> str:
    """Returns a message if the source of a run's own model has changed, otherwise "".

    Args:
        folder: The run directory.
        name: `model.name`; its module is imported.

    Raises:
        UserError: provenance.json is corrupt.
    """
    before = read_provenance(folder) if ":" in name else None
    changed = changed_files(before.model, find_definition(name)) if before else ""
    if not changed:
        return ""
    return (
        f"model.name={name}: {changed} changed since the run in {folder} was made, and may compute something else than "
        "what was trained. Set it back if that is not intended."
    )


def describe_run(built: Built) -> dict[str, Any]:
    """Returns the description of a run that is stored in its checkpoints.

    Returns:
        Plain values: `versions`, `model`, `parameters` (their number), `mesh` (axis -> size, if over 1), `devices`,
        `processes`, `strategy` and `precision` as in the config, `data` (see `data_facts`), `library` (the library of
        the model's module, or ""), `lora_scale` (the factor of low-rank adapters, or None), `since` (the start of the
        run, UTC).
    """
    mesh = built.layouts.mesh
    plain = as_plain(built.config)
    adapters = lora_config(built.config.model)
    return {
        "versions": {package: _version(package) for package in PACKAGES},
        "model": built.model.name,
        "parameters": built.layouts.num_parameters,
        "mesh": {name: mesh.axis_size(name) for name in mesh.axis_names if mesh.axis_size(name) > 1},
        "devices": mesh.size,
        "processes": jax.process_count(),
        "strategy": plain["strategy"],
        "precision": plain["precision"],
        "data": data_facts(built.splits, built.config.data.length),
        "library": getattr(built.model, "library", ""),
        "lora_scale": None if adapters is None else adapters.scale,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _sources(name: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields module -> path and hash of its source, for a module and its imports from the same directory."""
    found: dict[str, Path] = {}
    waiting, top = [name], name.partition(".")[0]
    folder = _folder(sys.modules.get(top))
    while waiting:
        module_name = waiting.pop()
        path = _file(sys.modules.get(module_name))
        if module_name in found or path is None or folder is None or folder not in path.parents:
            continue
        if _is_installed(path) and module_name.partition(".")[0] != top:
            continue
        found[module_name] = path
        waiting += _imports(sys.modules[module_name], path)
    for module_name, path in sorted(found.items()):
        yield module_name, (str(path), hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest())


def _imports(module: ModuleType, path: Path) -> Iterator[str]:
    """Yields the names of the modules that a source file imports anywhere, and of their packages."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        names: Sequence[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.__package__ or None
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _folder(module: ModuleType | None) -> Path | None:
    """Returns the directory that contains a module or package."""
    path = _file(module)
    if path is None:
        return None
    return path.parent.parent if path.name == "__init__.py" else path.parent


def _file(module: ModuleType | None) -> Path | None:
    """Returns the source file of a module, if there is one."""
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") and Path(file).is_file() else None


def _is_installed(path: Path) -> bool:
    """Returns True if a file belongs to an installed package or to Python itself."""
    return any(Path(sysconfig.get_paths()[name]).resolve() in path.parents for name in ("purelib", "platlib", "stdlib"))
