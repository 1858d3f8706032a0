"""`spmdkit checkpoint inspect`: the checkpoints of a run, and the contents of one. Reads no array."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..layouts.sizes import counted, format_bytes, format_mesh
from ..mesh.errors import printable
from .damage import DamagedCheckpoint
from .directory import Found, display_path, size_on_disk
from .restore import StoredCheckpoint

GROUPS = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "extra": "kept by strategy.data",
    "model_state": "kept by the model",
    "loss_scale": "kept by loss scaling",
}
"""The first part of a path -> the role of its arrays."""
OTHERS = {
    "damaged": "set aside: it could not be restored",
    "unfinished": "unfinished: not used; the next save removes it",
    "leaving": "its removal was interrupted; the next save completes it",
}
"""The condition of a directory that is not a complete checkpoint -> its description."""


def inspect(found: Found) -> dict[str, Any]:
    """Describes a directory of checkpoints, or one of them.

    Returns:
        Plain values. For one: see `describe`. For a run: `checkpoints` (the directory), `steps` (a list of step, bytes,
        saved, problem), `newest` (as `describe`, or None), `damaged`, `unfinished` and `leaving` (name -> bytes).

    Raises:
        CheckpointError: The chosen one is damaged.
        CheckpointUnavailable: The machine or the file system cannot read it.
    """
    if found.chosen is not None:
        return describe(StoredCheckpoint(found.chosen, of_any_run=True))
    steps = [_describe_step(found.checkpoints / str(step)) for step in found.contents.steps]
    good = [line["step"] for line in steps if not line["problem"]]
    newest = describe(StoredCheckpoint(found.checkpoints / str(good[-1]))) if good else None
    others = {
        kind: {name: size_on_disk(found.checkpoints / name) for name in getattr(found.contents, kind)}
        for kind in OTHERS
    }
    return {"checkpoints": str(found.checkpoints), "steps": steps, "newest": newest, **others}


def describe(stored: StoredCheckpoint) -> dict[str, Any]:
    """Describes one checkpoint.

    Returns:
        Plain values: `folder`, `step`, `saved` (local time), `bytes` (on disk), `parameters` (the number of elements),
        `about` (plain values about the run), `mesh` (axis -> size, without axes of size 1), `groups` (name -> arrays,
        numbers, bytes), `arrays` (path, shape, dtype, bytes), `run` (the identity of its run, or ""), `foreign` (why it
        is not of the run in its directory, or "").

    Raises:
        CheckpointUnavailable: The machine or the file system cannot read it.
    """
    groups: dict[str, dict[str, int]] = {}
    arrays = []
    for path, array in stored.arrays.items():
        group = groups.setdefault(path.split("/")[0], {"arrays": 0, "numbers": 0, "bytes": 0})
        group["arrays"] += 1
        group["numbers"] += array.size
        group["bytes"] += (size := stored.num_bytes(path))
        arrays.append({"path": path, "shape": list(array.shape), "dtype": str(array.dtype), "bytes": size})
    return {
        "folder": str(stored.folder),
        "step": stored.step,
        "saved": _local_time(stored),
        "bytes": size_on_disk(stored.folder),
        "parameters": groups["params"]["numbers"] if "params" in groups else 0,
        "about": stored.about,
        "mesh": stored.mesh,
        "groups": groups,
        "arrays": arrays,
        "run": stored.run,
        "foreign": stored.foreign,
    }


def text(description: Mapping[str, Any]) -> str:
    """Formats what `inspect` returns for people."""
    lines = _format_one(description) if "arrays" in description else _format_directory(description)
    return printable("\n".join(lines))


def _format_directory(found: Mapping[str, Any]) -> Iterator[str]:
    steps, newest = found["steps"], found["newest"]
    last = f", newest step {steps[-1]['step']}" if steps else ""
    yield f"{display_path(found['checkpoints'])}: {counted(len(steps), 'checkpoint')}{last}"
    for line in steps:
        problem = f"  {line['problem']}" if line["problem"] else ""
        yield f"  {line['step']:>10}  {line['saved'] or 'time unknown':<19}  {format_bytes(line['bytes']):>10}{problem}"
    for kind, what in OTHERS.items():
        for name, size in found[kind].items():
            yield f"  {name}  {format_bytes(size)}, {what}"
    if newest is not None:
        yield from _summarize(newest)


def _format_one(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{display_path(found['folder'])}: {format_bytes(found['bytes'])} on disk, saved {found['saved']}"
    yield from _summarize(found)
    rows = [
        (each["path"], each["dtype"], "x".join(map(str, each["shape"])) or "scalar", format_bytes(each["bytes"]))
        for each in found["arrays"]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for path, dtype, shape, size in rows:
        yield f"  {path:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}"


def _summarize(found: Mapping[str, Any]) -> Iterator[str]:
    about = found["about"]
    model = f" of {about['model']}" if "model" in about else ""
    yield f"Step {found['step']}: {found['parameters']:,} parameters{model}"
    for name, sums in found["groups"].items():
        if name in GROUPS:
            yield f"  {GROUPS[name]}: {format_bytes(sums['bytes'])} in {counted(sums['arrays'], 'array')}"
    if found["mesh"] or "mesh" in about:
        mesh = format_mesh(found["mesh"])
        processes = about.get("processes", 1)
        yield f"  saved on the mesh {mesh}{f' by {processes} processes' if processes > 1 else ''}"
    if "versions" in about:
        yield f"  saved by {', '.join(f'{name} {version}' for name, version in about['versions'].items())}"
    if found["run"]:
        yield f"  saved by the run {found['run']}"
    if found["foreign"]:
        yield f"  {found['foreign']}"
    yield "  checksums of all arrays"


def _describe_step(folder: Path) -> dict[str, Any]:
    line = {"step": int(folder.name), "bytes": size_on_disk(folder), "saved": "", "problem": ""}
    try:
        stored = StoredCheckpoint(folder, of_any_run=True)
        problem = stored.foreign.removeprefix(f"The checkpoint {folder} is ")
        return {**line, "saved": _local_time(stored), "problem": problem}
    except DamagedCheckpoint as error:
        return {**line, "problem": str(error).removeprefix(f"The checkpoint {folder} is ")}


def _local_time(stored: StoredCheckpoint) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.saved))
