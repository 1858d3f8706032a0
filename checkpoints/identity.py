"""The identity of a run: a checkpoint of another run with the same shapes looks like one of its own.

A run gets a random identity when it begins. The first lines of its config.yaml carry it, and so do its checkpoints, the
records of metrics.jsonl and owner.json:

    # run 5f0c1d2e3a4b5c6d in /shared/runs/b
    # copied from run 9ac17be0d1f2a3b4 at step 40

Everything that opens a checkpoint compares both (`StoredCheckpoint`): a resume, `load_run`, a warm start, an export. A
directory of an earlier version has no identity, and gets one at its next start; its checkpoints carry none.

Checkpoints that Python code saves without a config carry the identity of their series instead: that of the checkpoints
that are in the directory already, or a new one. A directory with checkpoints of two series is not restored.

A directory that was moved holds the same run. If a directory was copied, and the original is still there, the copy
becomes a run of its own when it starts: checkpoints that the original saved until then belong to both.
"""

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .checksums import read_description
from .damage import CheckpointError, DamagedCheckpoint
from .directory import contents

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
RUN = "run"
"""The key of the identity in the description of a checkpoint and in the records of metrics.jsonl."""
SERIES = "series"
"""The key of the identity in the description of a checkpoint that no run of a config wrote."""
IDENTITY_BYTES = 8
DIGITS = f"[0-9a-f]{{{2 * IDENTITY_BYTES}}}"
RUN_LINE = re.compile(rf"# run ({DIGITS})(?: in (/.*))?")
ORIGIN_LINE = re.compile(rf"# copied from run ({DIGITS}) at step ([0-9]+)")
MAX_LINE = 8192
"""Characters of a line of config.yaml that are read; a path is shorter."""


class ForeignRun(CheckpointError):
    """A checkpoint or a file of metrics is in the directory of another run."""


class Identity(NamedTuple):
    """The identity of a run.

    Attributes:
        run: Random hexadecimal digits; "" for a run of an earlier version.
        directory: The absolute path of its directory at its latest start; "" if unknown.
        origins: The runs that it was copied from -> the latest step that it shares with them.
    """

    run: str
    directory: str = ""
    origins: Mapping[str, int] = {}

    def has(self, run: str, step: int) -> bool:
        """Returns whether something that a run wrote at a step belongs to this run; True if it carries no identity."""
        if run in ("", self.run):
            return True
        return step <= self.origins.get(run, -1)

    def header(self) -> str:
        """Returns the first lines of config.yaml."""
        place = f" in {self.directory}" if self.directory.isprintable() and self.directory else ""
        lines = [f"# run {self.run}{place}"]
        lines += [f"# copied from run {run} at step {step}" for run, step in self.origins.items()]
        return "".join(f"{line}\n" for line in lines)


def new_identity(folder: Path) -> Identity:
    """Returns the identity of a new run.

    Args:
        folder: The absolute path of its directory.
    """
    return Identity(secrets.token_hex(IDENTITY_BYTES), str(folder))


def read_identity(folder: Path) -> Identity | None:
    """Reads the identity of the run in a directory.

    Returns:
        The identity; `run` is "" if the config does not carry one. None if config.yaml is missing.

    Raises:
        OSError: config.yaml cannot be read.
    """
    identity = Identity("")
    origins: dict[str, int] = {}
    try:
        with (folder / CONFIG).open(encoding="utf-8", errors="surrogateescape") as file:
            while (line := file.readline(MAX_LINE).rstrip("\n")).startswith("#"):
                run_line = RUN_LINE.fullmatch(line)
                origin_line = ORIGIN_LINE.fullmatch(line)
                if run_line is not None:
                    identity = Identity(run_line[1], run_line[2] or "")
                if origin_line is not None:
                    origins[origin_line[1]] = int(origin_line[2])
    except (FileNotFoundError, NotADirectoryError):
        return None
    return identity._replace(origins=origins)


def continue_identity(folder: Path) -> Identity:
    """Returns the identity under which the run in a directory goes on.

    Args:
        folder: The absolute path of the directory, which holds a run.

    Raises:
        OSError: A config.yaml cannot be read.
    """
    identity = read_identity(folder)
    if identity is None or not identity.run:
        return new_identity(folder)
    if not _is_copy(folder, identity):
        return identity._replace(directory=str(folder))
    latest = max(contents(folder / CHECKPOINTS).steps, default=0)
    origins = {run: min(step, latest) for run, step in identity.origins.items()}
    return new_identity(folder)._replace(origins={**origins, identity.run: latest})


def _is_copy(folder: Path, identity: Identity) -> bool:
    """Returns whether the directory that the identity names is another one, and still holds the same run.

    A directory of another user that cannot be read does not count.
    """
    original = Path(identity.directory)
    if not identity.directory or original == folder:
        return False
    try:
        there = read_identity(original)
        return there is not None and there.run == identity.run and not os.path.samefile(original, folder)
    except OSError:
        return False


def run_of(about: Mapping[str, Any]) -> str:
    """Returns the identity of a run in the values about a checkpoint; "" for another value that Python code gives."""
    run = about.get(RUN, "")
    if isinstance(run, str) and re.fullmatch(DIGITS, run):
        return run
    return ""


def explain_foreign_checkpoint(checkpoint: Path, step: int, run: str) -> str:
    """Explains why a checkpoint is not of the run in whose directory it is; "" if it is, or nothing says otherwise.

    Args:
        checkpoint: The absolute path of the checkpoint.
        step: Its step.
        run: The identity that it carries; "" for one of an earlier version, or that no run of a config wrote.

    Raises:
        OSError: config.yaml of the run cannot be read.
    """
    if not run or checkpoint.parent.name != CHECKPOINTS:
        return ""
    folder = checkpoint.parent.parent
    identity = read_identity(folder)
    if identity is None or identity.has(run, step):
        return ""
    reason = explain_foreign(folder, identity, run)
    return f"The checkpoint {checkpoint} is of another run: {reason}. {_remedy(identity, run, checkpoint.parent)}"


def explain_foreign(folder: Path, identity: Identity, run: str) -> str:
    """Returns the difference between the identity of a run and another one, without a period.

    Args:
        folder: The directory of the run.
        identity: The identity of the run.
        run: The other identity.
    """
    if run in identity.origins:
        step = identity.origins[run]
        return f"run {run}, from which this one was copied at step {step}, went on and saved it later"
    here = identity.run or "no identity (an earlier version wrote it, or its first line was removed)"
    return f"it carries the identity {run}, and {folder / CONFIG} carries {here}"


def check_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Checks that the records of metrics.jsonl are of the run in its directory.

    Only records up to the latest checkpoint count: a start drops the others, because their steps are trained again.

    Args:
        path: The file.
        records: Its records; those without an identity pass.

    Raises:
        ForeignRun: One is of another run.
        OSError: config.yaml of the run cannot be read.
    """
    folder = path.parent
    identity = read_identity(folder)
    if identity is None:
        return
    latest = max(contents(folder / CHECKPOINTS).steps, default=0)
    for record in records:
        run = record.get(RUN, "")
        step = record.get("step")
        if not isinstance(run, str) or not isinstance(step, int) or step > latest:
            continue
        if not identity.has(run, step):
            reason = explain_foreign(folder, identity, run)
            raise ForeignRun(f"{path} is of another run: {reason}. {_remedy(identity, run, folder)}")


def find_series(about: Mapping[str, Any], directory: Path) -> str:
    """Returns the identity of the series that a checkpoint continues: of the latest one there, or a new one.

    Args:
        about: Plain values about the run; with an identity of the run, there is no series.
        directory: The directory of its checkpoints, which need not exist.
    """
    if run_of(about):
        return ""
    steps_of = _steps_of_series(directory)
    latest = max(steps_of, key=lambda series: max(steps_of[series]), default="")
    return latest or secrets.token_hex(IDENTITY_BYTES)


def check_one_series(directory: Path) -> None:
    """Checks that all checkpoints of a directory are of one series, unless the config of a run tells its own.

    Raises:
        ForeignRun: They are of several; lists the steps of each.
        OSError: A file cannot be read.
    """
    identity = read_identity(directory.parent) if directory.name == CHECKPOINTS else None
    if identity is not None and identity.run:
        return
    steps_of = _steps_of_series(directory)
    if len(steps_of) < 2:
        return
    lines = [f"  steps {', '.join(map(str, steps))}: series {series}" for series, steps in steps_of.items()]
    raise ForeignRun(
        "\n".join([f"{directory} holds checkpoints of several trainings with the same shapes:", *lines])
        + "\nMove those of the others to another directory."
    )


def _steps_of_series(directory: Path) -> dict[str, list[int]]:
    """Returns the steps of each series, and of each run, of the complete checkpoints in a directory."""
    steps_of: dict[str, list[int]] = {}
    for step in contents(directory).steps:
        with suppress(DamagedCheckpoint, OSError):  # its restore explains why it cannot be read
            description = read_description(directory / str(step))
            series = description.get(SERIES) or run_of(description["about"])
            if series:
                steps_of.setdefault(series, []).append(step)
    return steps_of


def _remedy(identity: Identity, run: str, folder: Path) -> str:
    move = f"ove it out of {folder} to go on without it, or set run.dir to another directory."
    if identity.run:
        return f"M{move}"
    return f"If it is of this run, write '# run {run}' as the first line of {CONFIG}; otherwise m{move}"
