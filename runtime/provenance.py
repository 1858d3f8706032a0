"""The origin of a run beyond its config: its data, and the source of the user's own model and optimizer.

provenance.json is beside config.yaml. When a run continues, its content is compared with the current state. Other data
is an error: steps would train on examples that the run has not seen, or twice on the same ones. Other source code is a
warning, because the change may be intended.
"""

import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ..configs.config_text import as_plain
from ..data.source import Splits
from ..mesh.errors import UserError
from ..models.lora import lora_config
from .build_run import Built, data_facts

PROVENANCE = "provenance.json"
PACKAGES = ("spmdkit", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib"))
SCRIPTS = ("__main__", "__mp_main__")
"""Names of the script that was started; a process of `multiprocessing` imports it under the second."""


class Provenance(NamedTuple):
    """The origin of a run.

    Attributes:
        fingerprint: The fingerprint of the data, see `Splits`; "" if unknown.
        description: The description of the data.
        code: The source of the user's own model and optimizers: module -> path and hash.
    """

    fingerprint: str
    description: str
    code: Mapping[str, tuple[str, str]] = {}


def provenance_of(built: Built) -> Provenance:
    """Returns the origin of a run that is ready to start."""
    names = [str(built.config.model["name"]), *built.config.optimizer.names]
    code = {module: found for name in names for module, found in user_code(name).items()}
    return Provenance(built.splits.fingerprint, built.splits.description, code)


def user_code(name: str) -> dict[str, tuple[str, str]]:
    """Returns the source of the user's own `module:function`, and of the imported modules beside its top package.

    Args:
        name: A name in a config; names without a function come with spmdkit.

    Returns:
        Module -> path and hash of its source.
    """
    main = name.partition(":")[0]
    path = _source_file(main) if ":" in name else ""
    if not path:
        return {}
    levels = main.count(".") + (os.path.basename(path) == "__init__.py")
    folder = os.path.join(Path(path).parents[levels], "")
    files = {module: _source_file(module) for module in sorted(sys.modules) if module not in SCRIPTS}
    return {
        module: (file, hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest())
        for module, file in files.items()
        if file == path or (file.startswith(folder) and not file.startswith(INSTALLED))
    }


def _source_file(module: str) -> str:
    """Returns the path of an imported module; "" if it has no source."""
    file = getattr(sys.modules.get(module), "__dict__", {}).get("__file__")  # does not call a lazy module's __getattr__
    return os.path.abspath(file) if isinstance(file, str) and file.endswith(".py") and os.path.isfile(file) else ""


def to_json(found: Provenance) -> str:
    """Returns the content of provenance.json."""
    return json.dumps(found._asdict(), indent=2) + "\n"


def read_provenance(folder: Path) -> Provenance | None:
    """Reads provenance.json from a run directory; None if it is missing.

    Raises:
        UserError: The file is corrupt.
    """
    path = folder / PROVENANCE
    try:
        found = Provenance(**json.loads(path.read_bytes()))
        return found._replace(code={module: (file, hashed) for module, (file, hashed) in found.code.items()})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
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
    if before is None and goes_on:
        lines.append(f"{PROVENANCE} is missing: data and model cannot be compared with those of the run.")
    if before is not None and (changed := changed_code(before.code, now.code)):
        lines.append(
            f"warning: {changed}. If that is not intended, set it back, choose another run.dir, or start anew with "
            "--fresh, which moves this run aside."
        )
    return lines


def changed_code(before: Mapping[str, tuple[str, str]], now: Mapping[str, tuple[str, str]]) -> str:
    """Returns a message, without a period, that names the files with a different source; "" if there are none."""
    paths = [path for module, (path, hashed) in now.items() if before.get(module, ("", hashed))[1] != hashed]
    has = "has" if len(paths) == 1 else "have"
    since = "changed since this run was made, and may compute something else"
    return f"{', '.join(paths)} {has} {since}" if paths else ""


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
    changed = changed_code(before.code, user_code(name)) if before else ""
    return f"{folder}: {changed}. Set it back if that is not intended." if changed else ""


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
        "versions": package_versions(),
        "model": built.model.name,
        "parameters": built.layouts.num_parameters,
        "mesh": mesh.split_axes,
        "devices": mesh.size,
        "processes": jax.process_count(),
        "strategy": plain["strategy"],
        "precision": plain["precision"],
        "data": data_facts(built.splits, built.config.data.length),
        "library": getattr(built.model, "library", ""),
        "lora_scale": None if adapters is None else adapters.scale,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that a run depends on, by name."""
    found: dict[str, str] = dict.fromkeys(PACKAGES, "not installed")
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
