"""Finds the origin of the collectives of a compiled step: the strategy and the source line that ask for them."""

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from ..mesh.device_mesh import DeviceMesh
from ..parallel.collectives import Collective
from ..parallel.sharding.strategies import STRATEGIES
from ..parallel.xla.census import axes_of, replica_groups
from .timeline import Timeline

PACKAGE = Path(__file__).parents[1]
WRAPPERS = tuple(f"{PACKAGE}/parallel/{name}" for name in ("collectives.py", "xla/"))
"""Code that runs collectives for others: their origin is the line that calls it."""
_TABLES = ("FileNames", "FileLocations", "StackFrames")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_NUMBER = re.compile(r"=(\d+)")


class Origin(NamedTuple):
    """The origin of collectives.

    Attributes:
        strategy: The strategy whose code asks for them; the names of the mesh axes for other code.
        source: The file, relative to this package, and the line, such as "parallel/fsdp.py:139"; "" if XLA does not
            know, as for a collective that it combined from several.
    """

    strategy: str
    source: str = ""


def find_traffic(compiled_text: str, timeline: Timeline, mesh: DeviceMesh) -> list[tuple[Collective, Origin]]:
    """Returns the collectives of a step by kind, mesh axes and origin.

    Args:
        compiled_text: `compiled.as_text()` of the step.
        timeline: Its simulation.
        mesh: The mesh that it was compiled for.
    """
    lines = _source_lines(compiled_text)
    totals: defaultdict[tuple[str, tuple[str, ...], Origin], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for exchange in timeline.exchanges:
        axes = axes_of(replica_groups(exchange.attributes, mesh.size), mesh)
        if axes:
            frame = _FRAME.search(exchange.attributes)
            total = totals[exchange.kind, axes, origin_of(axes, lines.get(frame[1], "") if frame else "")]
            total[0] += exchange.runs
            total[1] += exchange.runs * exchange.bytes
    return [
        (Collective(kind, axes, round(count), round(size)), origin)
        for (kind, axes, origin), (count, size) in sorted(totals.items())
    ]


def origin_of(axes: tuple[str, ...], source: str = "") -> Origin:
    """Returns the origin of collectives over some mesh axes, from the line that asks for them, if it is known."""
    path, _, line = source.rpartition(":")
    file = Path(path)
    if PACKAGE not in file.parents:
        return Origin(" x ".join(axes), f"{file.name}:{line}" if path else "")
    inside = file.relative_to(PACKAGE)
    is_strategy = inside.parent.as_posix() == "parallel" and inside.stem in STRATEGIES
    return Origin(inside.stem if is_strategy else " x ".join(axes), f"{inside.as_posix()}:{line}")


def _source_lines(compiled_text: str) -> dict[str, str]:
    """Returns the file and line of each stack frame of a program, of its innermost call outside `WRAPPERS`.

    Nothing for a program without such tables. XLA writes a parent's number plus 1, and parents come first.
    """
    tables: dict[str, dict[str, str]] = {name: {} for name in _TABLES}
    current = None
    for line in compiled_text.splitlines():
        if line.startswith(("ENTRY", "%")):
            break
        if not line[:1].isdigit():
            current = tables.get(line.strip())
        elif current is not None:
            number, _, value = line.partition(" ")
            current[number] = value
    files, locations, frames = tables.values()
    found = {}
    for number, frame in frames.items():
        location, parent = _NUMBER.findall(frame)
        file, _, line = _NUMBER.findall(locations[location])[:3]
        path, caller = files[file].strip()[1:-1], found.get(str(int(parent) - 1))
        found[number] = caller if caller and path.startswith(WRAPPERS) else f"{path}:{line}"
    return found
