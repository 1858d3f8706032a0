"""The run directory: claimed for a new run, or checked to hold this run before it continues."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from ..checkpoints.damage import DamagedCheckpoint
from ..checkpoints.identity import Identity, check_records, continue_identity, new_identity, read_identity
from ..checkpoints.restore import StoredCheckpoint
from ..configs.config_sources import read_run_config
from ..configs.config_text import as_plain, resolved_yaml
from ..configs.restarts import rule_of
from ..configs.schema import Config
from ..configs.secret_variables import is_secret
from ..layouts.paths import flatten_mapping
from ..mesh.errors import UserError
from ..mesh.files import absolute_path, write_text
from ..mesh.processes import broadcast_text, exchange, is_main_process
from ..training.metrics import read_metrics
from ..training.run_files import PIECES, reason
from .machine_check import MACHINE, check_directory, explain_unusable
from .ownership import Ownership, refuse_if_in_use
from .process_check import check_shared
from .provenance import PROVENANCE, Provenance, check_data, read_provenance, to_json

REMEDY = "or start anew: with another run.dir, or with --fresh, which moves this run aside."


def adopt_directory(
    run_dir: str, plain: Mapping[str, Any], provenance: Provenance, seconds: float, *, fresh: bool = False
) -> Path:
    """Checks that the run directory is new or holds an earlier part of this run; writes nothing.

    Every process of the run calls this.

    Args:
        run_dir: `run.dir`.
        plain: The plain values of the config.
        provenance: The origin of the run.
        seconds: Seconds to wait for the other processes.
        fresh: Whether the content of the directory will be moved aside, whatever it is.

    Returns:
        The absolute path of `run.dir`.

    Raises:
        UserError: The directory is not usable (see `check_directory`), one of its files is corrupt, or it holds a run
            that differs in a fixed key or in its data; lists every difference. Its metrics are of another run.
        DirectoryInUse: It belongs to another job of this machine.
        DirectoryUnavailable: Its file system is full, read-only or broken.
        ProcessesMissing: Others did not get here in time.
    """
    folder = absolute_path(run_dir)
    check_directory(folder)
    refuse_if_in_use(folder)
    if fresh:
        if any(os.path.lexists(folder / name) for name in PIECES):
            check_directory(_aside(folder))
    else:
        given = folder / "config.yaml"
        written = read_run_config(given, REMEDY) if given.exists() else {}
        if is_run(folder):
            _check_same_run(folder, written, plain)
            if (folder / "metrics.jsonl").exists():
                check_records(folder / "metrics.jsonl", read_metrics(folder / "metrics.jsonl"))
            if before := read_provenance(folder):
                check_data(folder, before, provenance)
        elif written and not {*as_plain(Config())} <= {*written}:
            fix = "Rename it, or set run.dir to another directory."
            raise UserError(f"{given} was not written by a run, which would replace it. {fix}")
    exchange("the folder of the run was read", "", seconds=seconds)
    return folder


def identify_run(folder: Path, seconds: float, *, fresh: bool = False) -> Identity:
    """Returns the identity of the run that starts or continues in a directory; writes nothing.

    Every process of the run calls this; process 0 decides.

    Args:
        folder: The result of `adopt_directory`.
        seconds: Seconds to wait for process 0.
        fresh: Whether the content of the directory will be moved aside.

    Raises:
        OSError: The config of the run cannot be read.
        ProcessesMissing: Process 0 did not get here in time.
    """
    identity = Identity("")
    if is_main_process():
        is_new = fresh or not is_run(folder)
        identity = new_identity(folder) if is_new else continue_identity(folder)
    text = broadcast_text("the identity of the run", json.dumps(identity), seconds=seconds)
    return Identity(*json.loads(text))


def identity_remarks(folder: Path, identity: Identity, start: int) -> list[str]:
    """Returns messages about the identity of a run that resumes, before its config.yaml is written.

    Args:
        folder: The directory of the run.
        identity: Its identity from now on.
        start: The step of its latest checkpoint.

    Raises:
        CheckpointUnavailable: The checkpoint cannot be read now.
        OSError: The config of the run cannot be read.
    """
    before = read_identity(folder)
    if before is None or not before.run:
        return []
    if identity.run != before.run:
        return [
            f"{folder} is a copy of the run in {before.directory} and goes on as a run of its own from step {start}: "
            "checkpoints that the original saves later are not of this run."
        ]
    with suppress(DamagedCheckpoint):  # the run goes back to the one before it
        if not StoredCheckpoint(folder / "checkpoints" / str(start)).run:
            return [f"The checkpoint of step {start} carries no identity: it cannot be compared with that of the run."]
    return []


def claim_directory(folder: Path, ownership: Ownership, seconds: float) -> None:
    """Takes an adopted directory, which need not exist, in process 0. Every process of the run calls this.

    Args:
        folder: The result of `adopt_directory`.
        ownership: The ownership of the directory.
        seconds: Seconds to wait for the other processes.

    Raises:
        UserError: The directory cannot be created.
        DirectoryInUse: It belongs to another job.
        NotShared: Some processes see another directory under its name.
        DirectoryUnavailable: The file system is full, read-only or broken.
    """
    if is_main_process():
        make_directory(folder)
        ownership.take()
    check_shared(folder, seconds)


def write_config(
    config: Config, folder: Path, provenance: Provenance, identity: Identity, *, fresh: bool = False
) -> list[str]:
    """Writes provenance.json, and the identity of the run with the whole config as config.yaml, each atomically.

    Every process of the run calls this; process 0 writes, and the others wait for it.

    Args:
        config: The run's configuration.
        folder: The directory of the run, which belongs to it.
        provenance: The origin of the run.
        identity: The identity of the run.
        fresh: Whether to move aside the content of the directory first.

    Returns:
        Lines about what was moved.

    Raises:
        UserError: The content of the directory cannot be moved.
        DirectoryUnavailable: The file system is full, read-only or broken.
    """
    lines: list[str] = []
    if is_main_process():
        make_directory(folder)
        lines = _set_aside(folder) if fresh else []
        write_text(folder / PROVENANCE, to_json(provenance))
        secret = any(map(is_secret, config.launch.environment))
        text = identity.header() + resolved_yaml(config)
        write_text(folder / "config.yaml", text, mode=0o600 if secret else None)
    exchange("the folder of the run was written", "", seconds=config.timeouts.rendezvous)
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


def _set_aside(folder: Path) -> list[str]:
    """Moves the parts of a run, except its logs, to a new directory beside its own.

    Raises:
        UserError: They cannot be moved.
        DirectoryUnavailable: The file system is full, read-only or broken.
    """
    names = [name for name in PIECES if os.path.lexists(folder / name)]
    if not names:
        return []
    aside = _aside(folder)
    path = folder
    try:
        aside.mkdir()
        for path in [folder / name for name in names]:
            path.rename(aside / path.name)
    except OSError as error:
        with suppress(OSError):  # it is missing, or contains what was moved
            aside.rmdir()
        if error.errno in MACHINE:
            raise explain_unusable(aside, error) from error
        raise UserError(
            f"{path} cannot be moved to {aside}: {reason(error)}. Move it yourself, or set run.dir to another "
            "directory."
        ) from error
    return [f"Moved the run in {folder} to {aside}: {', '.join(names)}."]


def _aside(folder: Path) -> Path:
    """Returns the first of run.old-1, run.old-2, ... that does not exist."""
    numbered = (folder.with_name(f"{folder.name}.old-{number}") for number in count(1))
    return next(each for each in numbered if not os.path.lexists(each))


def _check_same_run(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if not before:
        raise UserError(f"{folder} holds a run, but its config.yaml is missing. Restore it, {REMEDY}")
    there, here = flatten_mapping(before), flatten_mapping(now)
    differences = "".join(
        f"\n  {key}: {there.get(key)!r} there, {here.get(key)!r} here ({rule.why})"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key) and (rule := rule_of(key)) and rule.kind == "never"
    )
    if differences:
        raise UserError(
            f"This command differs from the run in {folder} in keys that a run cannot change:{differences}\n"
            f"Set these keys back to continue that run, {REMEDY} With another run.dir, checkpoint.start_from={folder} "
            "begins with its parameters. Which keys may change when a run continues: spmdkit train --help-restart."
        )
