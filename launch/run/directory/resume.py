"""The folder of a run: taking it for a new run, or finding that it holds this one and may go on."""

import json
import os
import re
import shlex
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from ....configs.paths import MIXTURE, PATH_KEYS
from ....configs.reading.reader import read_yaml
from ....configs.restarts import is_fixed, rule_of
from ....configs.schema import Config
from ....configs.secret_variables import is_secret, redact_config
from ....configs.write import as_plain, resolved_yaml
from ....mesh.coordination import wait_for_all
from ....mesh.errors import UserError
from ....mesh.files import absolute_path, write_text
from ....mesh.processes import is_main_process, tell
from ....training.metrics import read_metrics
from ....training.run_files import PIECES
from .folder import check_folder, is_run, make_folder, move
from .ownership import Ownership, refuse_if_in_use
from .provenance import NAME, Provenance, as_json, check_data, read_provenance
from .shared import check_shared

MOST_TOLD = 6
"""Keys that a config.yaml lacks, in a message."""
MOST_SET_BACK = 4
"""Keys that a message sets back, as they would be typed."""
REMEDY = "or start anew: with another run.dir, or with --fresh, which moves this run aside."


def adopt_folder(config: Config, made_of: Provenance | None = None, *, fresh: bool = False) -> Path:
    """Takes the folder of a run, once it is new or found to hold an earlier part of the same run; writes nothing.

    Every process of the run calls this.

    Args:
        config: The config.
        made_of: What the run is made of; None compares nothing but the config.
        fresh: Whether what the folder holds will be moved aside, whatever it is.

    Returns:
        The absolute path of `run.dir`.

    Raises:
        UserError: The folder cannot be used (see `check_folder`), one of its files is damaged, or it holds a run that
            differs in something fixed; every difference is listed.
        DirectoryInUse: It belongs to another job of this machine.
        FolderUnavailable: Its file system is full, read-only or broken.
        ProcessesMissing: Others did not come here within `timeouts.rendezvous`.
    """
    folder = absolute_path(config.run.dir)
    check_folder(folder)
    refuse_if_in_use(folder)
    if fresh:
        if any(os.path.lexists(folder / name) for name in PIECES):
            check_folder(_aside(folder))
    else:
        written = _read_config(folder / "config.yaml")
        if is_run(folder):
            _check_same_run(folder, written, as_plain(config))
            _check_metrics(folder / "metrics.jsonl")
            before = read_provenance(folder)
            if before and made_of:
                check_data(folder, before, made_of)
    _wait_for_all("the folder of the run was read", config)
    return folder


def earlier(folder: Path) -> Provenance | None:
    """What the run in a folder was made of; None where there is no run, or it does not say."""
    return read_provenance(folder) if is_run(folder) else None


def write_config(
    config: Config,
    folder: Path,
    made_of: Provenance | None = None,
    *,
    fresh: bool = False,
    ownership: Ownership | None = None,
    taken: Callable[[], list[str]] = list,
) -> list[str]:
    """Takes an adopted folder, and writes provenance.json and the whole config as config.yaml, each in one piece.

    Every process of the run calls this; process 0 writes, and the others wait for it.

    Args:
        config: The config.
        folder: From `adopt_folder`.
        made_of: What the run is made of; None writes no provenance.json.
        fresh: Whether to move aside first what the folder holds.
        ownership: Of the folder; process 0 takes it before it writes.
        taken: Called once it is taken; raises where the folder is no longer as it was read. Gives lines for people.

    Returns:
        What was moved, in lines for people.

    Raises:
        UserError: The folder cannot be made, or what it holds cannot be moved.
        DirectoryInUse: It belongs to another job.
        NotShared: Some processes see another folder under its name.
        FolderUnavailable: The file system is full, read-only or broken.
    """
    lines: list[str] = []
    if ownership is not None:
        if is_main_process():
            make_folder(folder)
            ownership.take()
        check_shared(folder, config.timeouts.rendezvous)
    if is_main_process():
        make_folder(folder)
        lines = taken()
        lines += _set_aside(folder) if fresh else _keep_foreign_config(folder)
        if made_of is not None:
            write_text(folder / NAME, as_json(made_of))
        secret = any(map(is_secret, config.launch.environment))
        write_text(folder / "config.yaml", resolved_yaml(config), mode=0o600 if secret else None)
    _wait_for_all("the folder of the run was written", config)
    return lines


def _set_aside(folder: Path) -> list[str]:
    """Moves the pieces of a run, but its logs, to a new folder beside its own."""
    names = [name for name in PIECES if os.path.lexists(folder / name)]
    if not names:
        return []
    aside = _aside(folder)
    move([folder / name for name in names], aside)
    return [f"Moved the run in {folder} to {aside}: {', '.join(names)}."]


def _aside(folder: Path) -> Path:
    """The first folder of the names run.old-1, run.old-2, ... that is not there."""
    return _first_free(folder.with_name(f"{folder.name}.old"))


def _keep_foreign_config(folder: Path) -> list[str]:
    """Renames a config.yaml that no run wrote: the user's own, where run.dir is the folder it stands in."""
    path = folder / "config.yaml"
    if is_run(folder) or not path.exists():
        return []
    given = _read_config(path)
    if {*as_plain(Config())} <= {*given}:
        return []
    kept = _first_free(path.with_name(f"{path.name}.old"))
    if redact_config(given) != given:
        path.chmod(0o600)  # it holds the value of a secret
    path.rename(kept)
    return [f"{path} was written by no run: it is now {kept}."]


def _first_free(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(1))
    return next(each for each in numbered if not os.path.lexists(each))


def _read_config(path: Path) -> dict[str, Any]:
    """The config of the run in a folder; empty where there is none."""
    if not path.exists():
        return {}
    try:
        document = read_yaml(path.read_text(encoding="utf-8"))
        wrong = "; ".join(problem.message for problem in document.problems)
        wrong = wrong or ("" if isinstance(document.value, dict) else "it holds no mapping of sections")
    except UnicodeDecodeError as error:
        document, wrong = None, f"it is no text in UTF-8 ({error.reason})"
    if document is None or wrong:
        raise UserError(f"{path} cannot be read as the config of a run: {wrong}. Put it back, {REMEDY}")
    return document.value


def _check_metrics(path: Path) -> None:
    """Raises where metrics.jsonl is not the log of a run: it would be rewritten."""
    if not path.exists():
        return
    text = path.read_bytes().strip(b"\0")
    unfinished = text.rpartition(b"\n")[2]
    wrong = [record for record in read_metrics(path) if not _is_record(record)]
    if wrong or (unfinished and not unfinished.startswith(b"{")):
        shown = f"{wrong[0]}" if wrong else f"{unfinished[:80]!r}"
        raise UserError(f"{path} is no log of a run, it holds {shown[:90]}. Put it back, {REMEDY}")


def _is_record(record: dict[str, Any]) -> bool:
    step, numbers = record.get("step"), [value for name, value in record.items() if name != "step"]
    return type(step) is int and all(value is None or isinstance(value, int | float) for value in numbers)


def _check_same_run(folder: Path, before: Any, now: dict[str, Any]) -> None:
    keys = [key for key in sorted({*_leaves(before), *_leaves(now)}) if is_fixed(key)]
    changed = [key for key in keys if _get(before, key) != _get(now, key)]
    another = _get(before, "model.name") not in (None, _get(now, "model.name"))  # whose options are others
    silent = [key for key in changed if key not in _leaves(before) and not (another and key.startswith("model."))]
    told = [key for key in changed if key not in silent]
    lines = [f"{key}: {_get(before, key)!r} there, {_get(now, key)!r} here ({_why(key)})" for key in told]
    if silent:
        listed = f"{', '.join(silent[:MOST_TOLD])}{' and more' if len(silent) > MOST_TOLD else ''}"
        path = folder / "config.yaml"
        why = "it was cut, or another version wrote it" if path.exists() else "there is none"
        lines.append(f"{path} does not say {listed}: {why}")
    if changed:
        differences = "\n".join(f"  {line}" for line in lines)
        raise UserError(
            f"This command differs from the run in {folder} in what a run cannot change halfway:\n{differences}\n"
            + _ways_on(folder, {} if silent or another else {key: _get(before, key) for key in told})
        )


def _ways_on(folder: Path, before: dict[str, Any]) -> str:
    """What somebody can do who meets another run in run.dir.

    Args:
        folder: Of that run.
        before: The keys that would have to be set back, with their values there; empty where that is not all.
    """
    short = before and len(before) <= MOST_SET_BACK and not {*before} & {*PATH_KEYS, MIXTURE}
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
    """A key with its value, as one types it."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w/.:+-]*", value)
    return shlex.quote(f"{key}={value if is_plain else json.dumps(value)}")


def _why(key: str) -> str:
    rule = rule_of(key)
    assert rule is not None
    return rule.why


def _leaves(values: Any, prefix: str = "") -> list[str]:
    """The dotted keys of a plain config."""
    if not isinstance(values, dict):
        return [prefix]
    return [
        key for name, value in values.items() for key in _leaves(value, f"{prefix}.{name}" if prefix else str(name))
    ]


def _get(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _wait_for_all(what: str, config: Config) -> None:
    say = tell if is_main_process() else (lambda line: None)
    wait_for_all(what, seconds=config.timeouts.rendezvous, say=say)
