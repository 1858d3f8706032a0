"""Checksums of the files that describe a checkpoint: names, dtypes and chunks of arrays, the state of callbacks, notes.

    state/checksums.json
        files   SHA-256 of each file in state/ apart from the data of the arrays, such as _METADATA and _sharding
        notes   SHA-256 of each entry of _CHECKPOINT_METADATA, which contains what the run noted

The data of the arrays has checksums of its own (checksums.py). Together they cover every byte that a resume reads.
Orbax adds the time of the commit to _CHECKPOINT_METADATA later: of that entry, only the name is covered.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from .errors import DamagedCheckpoint
from .folder import DESCRIPTION, STATE

METADATA = "_CHECKPOINT_METADATA"
COMMITTED = "commit_timestamp_nsecs"
DATA = ("d", "ocdbt.process_")
"""How the names of directories with the data of arrays begin."""


def with_description(handler: ocp.CompositeCheckpointHandler) -> ocp.CompositeCheckpointHandler:
    """Returns a handler that also writes the checksums of the description, as the last file before the commit.

    Orbax looks up its handlers by their exact class, so that the method of this one is replaced.

    Args:
        handler: Writes checkpoints; its `finalize` is called by process 0, once all processes have written.
    """
    finalize = handler.finalize

    def finalize_with_checksums(directory: Any) -> None:
        finalize(directory)
        state = Path(directory, STATE)
        sums = {"files": _of_files(state, _described(state)), "notes": _of_notes(Path(directory))}
        (state / DESCRIPTION).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")

    handler.finalize = finalize_with_checksums
    return handler


def check_description(folder: Path) -> bool:
    """Compares the description of a checkpoint with its checksums.

    Args:
        folder: The checkpoint.

    Returns:
        False if the checkpoint has none, as those of earlier versions.

    Raises:
        DamagedCheckpoint: A file was changed.
        OSError: A file is missing or cannot be read.
    """
    state = folder / STATE
    if not (state / DESCRIPTION).exists():
        return False
    try:
        saved = json.loads((state / DESCRIPTION).read_bytes())
        files, notes = dict(saved["files"]), dict(saved["notes"])
        found = _of_files(state, files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(folder, f"{STATE}/{DESCRIPTION}") from error
    if changed := _changed(files, found):
        raise _damaged(folder, f"{STATE}/{changed}")
    try:
        found = _of_notes(folder)
    except (ValueError, AttributeError) as error:
        raise _damaged(folder, METADATA) from error
    if _changed(notes, {name: each for name, each in found.items() if name in notes}):
        raise _damaged(folder, METADATA)
    return True


def _of_files(state: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: _sum((state / name).read_bytes()) for name in names}


def _described(state: Path) -> list[str]:
    """The paths of the files that are covered, from `state`."""
    files = sorted(each.relative_to(state).as_posix() for each in state.rglob("*") if each.is_file())
    return [name for name in files if not name.startswith(DATA) and name != "commit_success.txt"]


def _of_notes(folder: Path) -> dict[str, str]:
    entries = json.loads((folder / METADATA).read_bytes())
    return {
        name: "" if name == COMMITTED else _sum(json.dumps(value, sort_keys=True).encode())
        for name, value in entries.items()
    }


def _changed(saved: dict[str, str], found: dict[str, str]) -> str:
    return next((name for name in sorted({*saved, *found}) if saved.get(name) != found.get(name)), "")


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _damaged(folder: Path, name: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"The checkpoint {folder} is damaged: {name} contains other bytes than were saved (its checksum differs)."
    )
