"""The collectives of a step, each with the strategy and the source line that ask for it, its link and least time."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..mesh.device_mesh import DeviceMesh
from ..parallel.collectives import Collective
from ..parallel.sharding.strategies import STRATEGIES
from ..parallel.xla.census import axes_of, replica_groups
from .kernel_time import Efficiency
from .link_time import collective_seconds
from .timeline import Timeline

PACKAGE = Path(__file__).parents[1]
WRAPPERS = tuple(f"{PACKAGE}/parallel/{name}" for name in ("collectives.py", "xla/"))
"""Code that runs collectives for others: their origin is the line that calls it."""
PEAK = Efficiency(link=1.0, network=1.0, link_seconds=0.0, network_seconds=0.0)
"""The links at their peak, without a latency: no exchange of these bytes is faster."""
_TABLES = ("FileNames", "FileLocations", "StackFrames")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_NUMBER = re.compile(r"=(\d+)")


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind over the same mesh axes and of the same origin in one step.

    Attributes:
        kind: HLO's name, such as "all-gather".
        axes: The mesh axes.
        strategy: The strategy whose code asks for them; the names of the mesh axes for other code.
        source: The line of that code, such as "parallel/fsdp.py:139"; "" if it is unknown.
        count: The number per step.
        bytes: Bytes of the whole values, summed over `count`.
        link: The slowest link that they cross: "host" or "network".
        least_seconds: The time of these bytes over that link at its peak.
    """

    kind: str
    axes: tuple[str, ...]
    strategy: str
    source: str
    count: int
    bytes: int
    link: str
    least_seconds: float


def find_traffic(compiled_text: str, timeline: Timeline, mesh: DeviceMesh) -> tuple[Traffic, ...]:
    """Returns the collectives of a compiled step.

    Args:
        compiled_text: `compiled.as_text()` of the step.
        timeline: Its simulation.
        mesh: The mesh of the target that it was compiled for.
    """
    lines = _source_lines(compiled_text)
    totals: defaultdict[tuple[str, tuple[str, ...], str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for exchange in timeline.exchanges:
        axes = axes_of(replica_groups(exchange.attributes, mesh.size), mesh)
        if axes:
            frame = _FRAME.search(exchange.attributes)
            total = totals[exchange.kind, axes, *_origin(axes, lines.get(frame[1], "") if frame else "")]
            total[0] += exchange.runs
            total[1] += exchange.runs * exchange.bytes
    return tuple(
        _traffic(Collective(kind, axes, round(count), round(size)), mesh, *origin)
        for (kind, axes, *origin), (count, size) in sorted(totals.items())
    )


def expected_traffic(lines: Iterable[Collective], mesh: DeviceMesh) -> tuple[Traffic, ...]:
    """Returns the collectives that the strategies predict, whose lines are not known."""
    return tuple(_traffic(line, mesh, *_origin(line.axes)) for line in lines)


def _traffic(line: Collective, mesh: DeviceMesh, strategy: str, source: str) -> Traffic:
    """Returns collectives with their link, and their time at the peak of that link."""
    target, numbers = mesh.target, np.arange(mesh.size).reshape(mesh.shape)  # a target has its devices in order
    assert target is not None
    last = [mesh.axis_names.index(axis) for axis in line.axes]
    groups = np.moveaxis(numbers, last, range(-len(last), 0)).reshape(-1, *(mesh.shape[axis] for axis in last))
    devices = groups.reshape(len(groups), -1)
    crosses = not target.shape and bool((devices // target.gpus != devices[:, :1] // target.gpus).any())
    seconds = collective_seconds(line.kind, line.bytes, devices.tolist(), target, PEAK)
    link = "network" if crosses else "host"
    return Traffic(line.kind, line.axes, strategy, source, line.count, line.bytes, link, seconds)


def _origin(axes: tuple[str, ...], source: str = "") -> tuple[str, str]:
    """Returns the strategy and the line that ask for collectives over some mesh axes."""
    path, _, line = source.rpartition(":")
    file = Path(path)
    if PACKAGE not in file.parents:
        return " x ".join(axes), f"{file.name}:{line}" if path else ""
    inside = file.relative_to(PACKAGE)
    is_strategy = inside.parent.as_posix() == "parallel" and inside.stem in STRATEGIES
    return inside.stem if is_strategy else " x ".join(axes), f"{inside.as_posix()}:{line}"


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
