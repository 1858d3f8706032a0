"""The run directory: claimed for a new run, or checked to hold this run before it continues."""

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ..configs.config_paths import MIXTURE, PATH_KEYS
from ..configs.config_text import as_plain, resolved_yaml
from ..configs.restarts import is_fixed, rule_of
from ..configs.schema import Config
from ..configs.secret_variables import is_secret, redact_config
from ..configs.yaml_reader import read_yaml
from ..layouts.paths import flatten_mapping
from ..mesh.errors import UserError
from ..mesh.files import absolute_path, write_text
from ..mesh.processes import is_main_process, print_progress, wait_for_all
from ..training.metrics import read_metrics
from ..training.run_files import PIECES, reason
from .machine_check import MACHINE, check_directory, explain_unusable
from .ownership import Ownership, refuse_if_in_use
from .process_check import check_shared
from .provenance import NAME as PROVENANCE
from .provenance import Provenance, check_data, read_provenance, to_json

MAX_MISSING = 6
"""Keys in a message that config.yaml lacks."""
MAX_SET_BACK = 4
"""Keys in a message that must be set back, as they would be typed."""
REMEDY = "or start anew: with another run.dir, or with --fresh, which moves this run aside."


def adopt_directory(config: Config, provenance: Provenance | None = None, *, fresh: bool = False) -> Path:
    """Checks that the run directory is new or holds an earlier part of this run; writes nothing.

    Every process of the run calls this.

    Args:
        config: The run's configuration.
        provenance: The origin of the run; None compares only the config.
        fresh: Whether the content of the directory will be moved aside, whatever it is.

    Returns:
        The absolute path of `run.dir`.

    Raises:
        UserError: The directory is not usable (see `check_directory`), one of its files is corrupt, or it holds a run
            that differs in a fixed key; lists every difference.
        DirectoryInUse: It belongs to another job of this machine.
        DirectoryUnavailable: Its file system is full, read-only or broken.
        ProcessesMissing: Others did not get here within `timeouts.rendezvous`.
    """
    folder = absolute_path(config.run.dir)
    check_directory(folder)
    refuse_if_in_use(folder)
    if fresh:
        if any(os.path.lexists(folder / name) for name in PIECES):
            check_directory(_aside(folder))
    else:
        written = _read_config(folder / "config.yaml")
        if is_run(folder):
            _check_same_run(folder, written, as_plain(config))
            _check_metrics(folder / "metrics.jsonl")
            before = read_provenance(folder)
            if before and provenance:
                check_data(folder, before, provenance)
    _wait_for_all("the folder of the run was read", config.timeouts.rendezvous)
    return folder


def write_config(
    config: Config,
    folder: Path,
    provenance: Provenance | None = None,
    *,
    fresh: bool = False,
    ownership: Ownership | None = None,
    on_claim: Callable[[], list[str]] = list,
) -> list[str]:
    """Claims an adopted directory, and writes provenance.json and the whole config as config.yaml, each atomically.

    Every process of the run calls this; process 0 writes, and the others wait for it.

    Args:
        config: The run's configuration.
        folder: The result of `adopt_directory`.
        provenance: The origin of the run; None writes no provenance.json.
        fresh: Whether to move aside the content of the directory first.
        ownership: The ownership of the directory; process 0 takes it before it writes.
        on_claim: Called after the claim; raises an error if the directory has changed, and returns lines to print.

    Returns:
        Lines about what was moved.

    Raises:
        UserError: The directory cannot be created, or its content cannot be moved.
        DirectoryInUse: It belongs to another job.
        NotShared: Some processes see another directory under its name.
        DirectoryUnavailable: The file system is full, read-only or broken.
    """
    lines: list[str] = []
    if ownership is not None:
        if is_main_process():
            make_directory(folder)
            ownership.take()
        check_shared(folder, config.timeouts.rendezvous)
    if is_main_process():
        make_directory(folder)
        lines = on_claim()
        lines += _set_aside(folder) if fresh else _keep_foreign_config(folder)
        if provenance is not None:
            write_text(folder / PROVENANCE, to_json(provenance))
        secret = any(map(is_secret, config.launch.environment))
        write_text(folder / "config.yaml", resolved_yaml(config), mode=0o600 if secret else None)
    _wait_for_all("the folder of the run was written", config.timeouts.rendezvous)
    return lines


def is_run(folder: Path) -> bool:
    """Returns True if a directory holds any part of a training: a checkpoint, or metrics of a step."""
    checkpoints, metrics = folder / "checkpoints", folder / "metrics.jsonl"
    saved = checkpoints.is_dir() and any(each.name.isdecimal() for each in checkpoints.iterdir())
    return saved or (metrics.is_file() and metrics.stat().st_size > 0)


def make_directory(folder: Path) -> None:
    """Creates a run directory with its parents; it may exist.

    Raises:
        UserError: It cannot be created: a file is in its place, or permission is denied.
        DirectoryUnavailable: The file system is full, read-only or broken.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_unusable(folder, error) from error


def move(paths: Sequence[Path], folder: Path) -> None:
    """Moves files and directories, in order, into a new directory on the same file system.

    Raises:
        UserError: They cannot be moved; if this is true of the first, nothing is changed.
        DirectoryUnavailable: The file system is full, read-only or broken.
    """
    moved = 0
    try:
        folder.mkdir()
        for path in paths:
            path.rename(folder / path.name)
            moved += 1
    except OSError as error:
        if not moved and folder.is_dir():
            folder.rmdir()
        if error.errno in MACHINE:
            raise explain_unusable(folder, error) from error
        raise UserError(
            f"{paths[moved]} cannot be moved to {folder}: {reason(error)}. Move it yourself, or set run.dir to another "
            "directory."
        ) from error


def _set_aside(folder: Path) -> list[str]:
    """Moves the parts of a run, except its logs, to a new directory beside its own."""
    names = [name for name in PIECES if os.path.lexists(folder / name)]
    if not names:
        return []
    aside = _aside(folder)
    move([folder / name for name in names], aside)
    return [f"Moved the run in {folder} to {aside}: {', '.join(names)}."]


def _aside(folder: Path) -> Path:
    """Returns the first of run.old-1, run.old-2, ... that does not exist."""
    return _first_free(folder.with_name(f"{folder.name}.old"))


def _keep_foreign_config(folder: Path) -> list[str]:
    """Renames a config.yaml that no run wrote: the user's own, if run.dir is its directory."""
    path = folder / "config.yaml"
    if is_run(folder) or not path.exists():
        return []
    given = _read_config(path)
    if {*as_plain(Config())} <= {*given}:
        return []
    kept = _first_free(path.with_name(f"{path.name}.old"))
    if redact_config(given) != given:
        path.chmod(0o600)  # it contains a secret
    path.rename(kept)
    return [f"{path} was not written by a run: it is now {kept}."]


def _first_free(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(1))
    return next(each for each in numbered if not os.path.lexists(each))


def _read_config(path: Path) -> dict[str, Any]:
    """Returns the config of the run in a directory; empty if it is missing."""
    if not path.exists():
        return {}
    try:
        document = read_yaml(path.read_text(encoding="utf-8"))
        wrong = "; ".join(problem.message for problem in document.problems)
        wrong = wrong or ("" if isinstance(document.value, dict) else "it is not a mapping of sections")
    except UnicodeDecodeError as error:
        document, wrong = None, f"it is not valid UTF-8 ({error.reason})"
    if document is None or wrong:
        raise UserError(f"{path} is not a valid config of a run: {wrong}. Restore it, {REMEDY}")
    return document.value


def _check_metrics(path: Path) -> None:
    """Raises an error if metrics.jsonl is not the log of a run, because it would be rewritten."""
    if not path.exists():
        return
    text = path.read_bytes().strip(b"\0")
    unfinished = text.rpartition(b"\n")[2]
    wrong = [record for record in read_metrics(path) if not _is_record(record)]
    if wrong or (unfinished and not unfinished.startswith(b"{")):
        shown = f"{wrong[0]}" if wrong else f"{unfinished[:80]!r}"
        raise UserError(f"{path} is not the log of a run, it contains {shown[:90]}. Restore it, {REMEDY}")


def _is_record(record: dict[str, Any]) -> bool:
    step, numbers = record.get("step"), [value for name, value in record.items() if name != "step"]
    return type(step) is int and all(value is None or isinstance(value, int | float) for value in numbers)


def _check_same_run(folder: Path, before: Any, now: dict[str, Any]) -> None:
    known = flatten_mapping(before) if isinstance(before, Mapping) else {}
    keys = [key for key in sorted({*known, *flatten_mapping(now)}) if is_fixed(key)]
    changed = [key for key in keys if _get(before, key) != _get(now, key)]
    other_model = _get(before, "model.name") not in (None, _get(now, "model.name"))  # with other options
    missing = [key for key in changed if key not in known and not (other_model and key.startswith("model."))]
    differing = [key for key in changed if key not in missing]
    lines = [f"{key}: {_get(before, key)!r} there, {_get(now, key)!r} here ({_why(key)})" for key in differing]
    if missing:
        listed = f"{', '.join(missing[:MAX_MISSING])}{' and more' if len(missing) > MAX_MISSING else ''}"
        path = folder / "config.yaml"
        why = "it was truncated, or another version wrote it" if path.exists() else "the file is missing"
        lines.append(f"{path} does not contain {listed}: {why}")
    if changed:
        differences = "\n".join(f"  {line}" for line in lines)
        raise UserError(
            f"This command differs from the run in {folder} in keys that a run cannot change:\n{differences}\n"
            + _alternatives(folder, {} if missing or other_model else {key: _get(before, key) for key in differing})
        )


def _alternatives(folder: Path, before: dict[str, Any]) -> str:
    """Returns the alternatives of a user whose run.dir holds another run.

    Args:
        folder: The directory of that run.
        before: The keys to set back, with their values there; empty if setting them back is not enough.
    """
    short = before and len(before) <= MAX_SET_BACK and not {*before} & {*PATH_KEYS, MIXTURE}
    set_back = " ".join(_typed(key, value) for key, value in before.items())
    ways = {
        "go on with that run": f"the same command with {set_back}" if short else "set these keys back",
        "train beside it": f"the same command with {_typed('run.dir', str(_first_free(folder)))}",
        "begin with its parameters": f"that, and {_typed('checkpoint.start_from', str(folder))}",
        "train in its place": f"the same command with --fresh, which moves that run to {_aside(folder)}",
    }
    width = max(map(len, ways)) + 1
    lines = [f"  {f'{name}:':<{width}}  {way}" for name, way in ways.items()]
    return "\n".join(["Either", *lines, "Which keys may change when a run goes on: spmdkit train --help-restart."])


def _typed(key: str, value: Any) -> str:
    """Returns key=value as a user would type it."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w/.:+-]*", value)
    return shlex.quote(f"{key}={value if is_plain else json.dumps(value)}")


def _why(key: str) -> str:
    rule = rule_of(key)
    assert rule is not None
    return rule.why


def _get(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _wait_for_all(what: str, seconds: float) -> None:
    wait_for_all(what, seconds=seconds, say=print_progress if is_main_process() else (lambda line: None))
