"""`spmdkit checkpoint inspect`: which checkpoints a run has, and what one holds. Reads no array but the step."""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...layouts.sizes import counted, format_bytes
from ...mesh.text import printable
from ...training.checkpointing.errors import DamagedCheckpoint
from ...training.checkpointing.folder import size_on_disk
from .finding import Found, shown
from .stored import StoredArray, StoredCheckpoint

GROUPS = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "extra": "kept by strategy.data",
    "model_state": "kept by the model",
    "loss_scale": "kept by loss scaling",
}
"""The first part of a path -> what its arrays are."""


def inspect(found: Found) -> dict[str, Any]:
    """Describes a folder of checkpoints, or one of them.

    Returns:
        Plain values. Of one: see `describe`. Of a run: `checkpoints` (the folder), `steps` (a list of step, bytes,
        saved, problem), `newest` (as `describe`, or None), `damaged`, `unfinished` and `leaving` (name -> bytes).

    Raises:
        CheckpointError: The one that is asked for is damaged.
        CheckpointUnavailable: The machine or the file system does not let it be read.
    """
    if found.chosen is not None:
        return describe(StoredCheckpoint(found.chosen))
    steps = [_line(found.checkpoints / str(step)) for step in found.contents.steps]
    good = [line["step"] for line in steps if not line["problem"]]
    newest = StoredCheckpoint(found.checkpoints / str(good[-1])) if good else None
    others = {
        kind: {name: size_on_disk(found.checkpoints / name) for name in getattr(found.contents, kind)}
        for kind in ("damaged", "unfinished", "leaving")
    }
    return {
        "checkpoints": str(found.checkpoints),
        "steps": steps,
        "newest": describe(newest) if newest else None,
        **others,
    }


def describe(stored: StoredCheckpoint) -> dict[str, Any]:
    """Describes one checkpoint.

    Returns:
        Plain values: `folder`, `step`, `saved` (local time, or ""), `bytes` (on disk), `checksums` (whether there are
        any), `parameters` (how many numbers), `about` (what the run said of itself), `mesh` (axis -> size, of those
        over 1), `groups` (name -> arrays, numbers, bytes), `arrays` (path, shape, dtype, bytes, chunk).

    Raises:
        DamagedCheckpoint: A description in it is missing or damaged.
        CheckpointUnavailable: The machine or the file system does not let it be read.
    """
    arrays = list(stored.arrays.values())
    return {
        "folder": str(stored.folder),
        "step": stored.step,
        "saved": _saved(stored.metadata),
        "bytes": size_on_disk(stored.folder),
        "checksums": stored.checksums is not None,
        "parameters": sum(array.size for array in stored.parameters),
        "about": stored.about,
        "mesh": stored.about.get("mesh", stored.mesh),
        "groups": {name: _sums(name, arrays) for name in dict.fromkeys(array.path.split("/")[0] for array in arrays)},
        "arrays": [_as_json(array) for array in arrays],
    }


def text(description: Mapping[str, Any]) -> str:
    """What `inspect` describes, for people."""
    lines = _of_one(description) if "arrays" in description else _of_folder(description)
    return printable("\n".join(lines))


def _of_folder(found: Mapping[str, Any]) -> Iterator[str]:
    steps, newest = found["steps"], found["newest"]
    last = f", newest step {steps[-1]['step']}" if steps else ""
    yield f"{shown(found['checkpoints'])}: {counted(len(steps), 'checkpoint')}{last}"
    for line in steps:
        problem = f"  {line['problem']}" if line["problem"] else ""
        yield f"  {line['step']:>10}  {line['saved'] or 'time unknown':<19}  {format_bytes(line['bytes']):>10}{problem}"
    for kind, what in (
        ("damaged", "set aside: it could not be restored"),
        ("unfinished", "unfinished: not used; the next save removes it"),
        ("leaving", "its removal was interrupted; the next save ends it"),
    ):
        for name, size in found[kind].items():
            yield f"  {name}  {format_bytes(size)}, {what}"
    if newest is not None:
        yield from _summary(newest)


def _of_one(found: Mapping[str, Any]) -> Iterator[str]:
    saved = found["saved"] or "at a time unknown"
    yield f"{shown(found['folder'])}: {format_bytes(found['bytes'])} on disk, saved {saved}"
    yield from _summary(found)
    rows = [
        (each["path"], each["dtype"], "x".join(map(str, each["shape"])) or "scalar", format_bytes(each["bytes"]))
        for each in found["arrays"]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for path, dtype, shape, size in rows:
        yield f"  {path:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}"


def _summary(found: Mapping[str, Any]) -> Iterator[str]:
    about = found["about"]
    model = f" of {about['model']}" if "model" in about else ""
    yield f"Step {found['step']}: {found['parameters']:,} parameters{model}"
    for name, sums in found["groups"].items():
        if name in GROUPS:
            yield f"  {GROUPS[name]}: {format_bytes(sums['bytes'])} in {counted(sums['arrays'], 'array')}"
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items()) or "1 device"
    processes = about.get("processes", 1)
    yield f"  saved on the mesh {mesh}{f' by {processes} processes' if processes > 1 else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    yield f"  saved by {versions or 'an earlier version, which says no more'}"
    yield "  checksums of all arrays" if found["checksums"] else "  no checksums: it is of an earlier version"


def _line(folder: Path) -> dict[str, Any]:
    line = {"step": int(folder.name), "bytes": size_on_disk(folder), "saved": "", "problem": ""}
    try:
        stored = StoredCheckpoint(folder)
        len(stored.arrays)
    except DamagedCheckpoint as error:
        return {**line, "problem": str(error).removeprefix(f"The checkpoint {folder} is ")}
    return {**line, "saved": _saved(stored.metadata)}


def _saved(metadata: Mapping[str, Any]) -> str:
    with suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        seconds = metadata["commit_timestamp_nsecs"] / 1e9
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return ""


def _sums(group: str, arrays: list[StoredArray]) -> dict[str, int]:
    of_it = [array for array in arrays if array.path.split("/")[0] == group]
    return {
        "arrays": len(of_it),
        "numbers": sum(array.size for array in of_it),
        "bytes": sum(array.nbytes for array in of_it),
    }


def _as_json(array: StoredArray) -> dict[str, Any]:
    return {
        "path": array.path,
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "bytes": array.nbytes,
        "chunk": list(array.chunk),
    }
