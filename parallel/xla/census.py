"""Counts the collectives of a compiled step by kind and mesh axis, with bytes, from XLA's own text.

A collective inside a loop counts once per turn, and an asynchronous pair (`-start`, `-done`) counts once. XLA's text
contains the trip counts that XLA knows. For the parts of a pipeline and the experts of a mixture, name scopes contain
them, see `optional_turns.py`.
"""

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ...mesh.device_mesh import DeviceMesh
from ..collectives import Collective, merge

_SHAPE = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_GROUP_LIST = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_GROUP_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_GROUP_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def census(compiled_text: str, mesh: DeviceMesh) -> tuple[Collective, ...]:
    """Reads the collectives of one run of a compiled program.

    Args:
        compiled_text: `compiled.as_text()` of a program over all devices of the mesh.
        mesh: The mesh it was compiled for; partition i of the program is the i-th device in row-major order.

    Returns:
        One line for each kind and set of axes: the axes along which the members of a group differ.
    """
    computations, entry = computations_of(compiled_text)
    totals: dict[tuple[str, tuple[str, ...]], tuple[Fraction, Fraction]] = {}
    pending = [Call(entry, Fraction(1))]
    while pending:
        name, times = pending.pop()
        for instruction in computations.get(name, ()):
            found = collective_of(instruction)
            if found:  # a loop that XLA unrolled has copies of it, each of which runs in some turns: add the shares
                for line in _collective(found, instruction, mesh):
                    count, size = totals.get(line.key, (Fraction(0), Fraction(0)))
                    totals[line.key] = (count + times, size + times * line.bytes)
            else:
                pending.extend(Call(call.name, call.times * times) for call in calls_of(instruction))
    odd = [f"{kind} over {axes} runs {count} times" for (kind, axes), (count, _) in totals.items() if count % 1]
    assert not odd, odd
    return merge(Collective(kind, axes, int(count), int(size)) for (kind, axes), (count, size) in totals.items())


def _collective(found: re.Match[str], instruction: str, mesh: DeviceMesh) -> Iterator[Collective]:
    """Yields one run of a collective; nothing if its groups have one member."""
    result, kind, start = found.groups()
    groups = replica_groups(instruction, mesh.size)
    if max(map(len, groups)) < 2:
        return
    sizes = [math.prod(int(n) for n in dims.split(",") if n) * _bytes(dtype) for dtype, dims in _SHAPE.findall(result)]
    if start and kind != "all-reduce" and len(sizes) > 1:
        sizes = sizes[len(sizes) // 2 :]  # an asynchronous start returns (operands, results, ...)
    total = sum(sizes) * (len(groups[0]) if kind == "reduce-scatter" else 1)
    yield Collective(kind, axes_of(groups, mesh), 1, total)


def _bytes(dtype: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return max(1, bits // 8)


def replica_groups(instruction: str, num_devices: int) -> list[list[int]]:
    """Returns the groups of partitions that communicate, from any of XLA's notations; an omitted list means all."""
    if pairs := _PAIRS.search(instruction):
        return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs.group(1)) if a != b] or [[0]]
    if named := _GROUP_MESH.search(instruction):
        return _mesh_groups(*named.groups())
    if iota := _GROUP_IOTA.search(instruction):
        rows, columns, dims, order = iota.groups()
        return _iota(dims, order).reshape(int(rows), int(columns)).tolist()
    if listed := _GROUP_LIST.search(instruction):
        groups = [[int(n) for n in group.split(",") if n] for group in re.findall(r"\{([\d,]*)\}", listed.group(1))]
        if any(groups):
            return groups
    return [list(range(num_devices))]


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Returns the devices written as `[2,4]T(1,0)`: numbered row by row, then transposed."""
    sizes = [int(n) for n in dims.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose([int(n) for n in order.split(",")]) if order else ids


def _mesh_groups(axes: str, device_dims: str | None, device_order: str | None, taken: str) -> list[list[int]]:
    """Returns the groups written as mesh axes: `['data'=2,'fsdp'=4] {'fsdp'}`.

    `'fsdp':(2)2` is a part of an axis: the factor of size 2 after a factor of size 2. `device_ids=([4,2]T(1,0))` means
    that devices are in another order.
    """
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    dims: list[int] = []
    members: list[int] = []
    parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _GROUP_AXIS.findall(taken)}
    for name, size in sizes.items():
        before, width = parts.get(name, (1, 1))
        members.append(len(dims) + 1)
        dims += [before, width, size // (before * width)]
    devices = _iota(device_dims, device_order) if device_dims else np.arange(math.prod(dims))
    others = [dim for dim in range(len(dims)) if dim not in members]
    count = math.prod(dims[dim] for dim in members)
    return devices.reshape(dims).transpose(others + members).reshape(-1, count).tolist()


def axes_of(groups: list[list[int]], mesh: DeviceMesh) -> tuple[str, ...]:
    """Returns the mesh axes along which the members of any group differ."""
    shape = tuple(mesh.shape)
    differs = np.zeros(len(shape), bool)
    for group in groups:
        coordinates = np.stack(np.unravel_index(group, shape), axis=-1)
        differs |= (coordinates != coordinates[0]).any(axis=0)
    return tuple(name for name, used in zip(mesh.axis_names, differs, strict=True) if used)


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
KINDS += ("ragged-all-to-all", "collective-broadcast")
"""HLO's names of collectives."""
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_ROLES = ("body", "to_apply", "calls", "branch_computations", "true_computation", "false_computation")
_CALLED = re.compile(rf"({'|'.join(_ROLES)})=(\{{[^}}]*\}}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TURNS = re.compile(r"\bturns_(\d+)_of_(\d+)\)*/while\"")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_BRANCH_TURNS = re.compile(r"\bturns_([\d_]+)_of_(\d+)/(?:cond|branch\w*)\"")


class Call(NamedTuple):
    """A computation that an instruction runs, and the average number of runs, which may be a fraction."""

    name: str
    times: Fraction


def computations_of(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the instructions of each computation of `compiled.as_text()` in order, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            name = header.group(2)
            computations[name] = []
            entry = name if header.group(1) else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def collective_of(instruction: str) -> re.Match[str] | None:
    """Matches a collective: the type of its result, its kind, and "-start" if it is asynchronous. Otherwise None."""
    if any(kind in instruction for kind in KINDS):  # a plain search is faster for all other instructions
        return _COLLECTIVE.search(instruction)
    return None


def calls_of(instruction: str) -> Iterator[Call]:
    """Yields the computations that an instruction runs."""
    if not any(role in instruction for role in _ROLES):
        return
    trips, turns, branch = (each.search(instruction) for each in (_TRIPS, _TURNS, _BRANCH_TURNS))
    for role, names in _CALLED.findall(instruction):
        called, times = re.findall(r"[\w.\-]+", names), [Fraction(1)]
        if role == "body" and trips:
            times = [Fraction(int(trips.group(1)))]
        elif role == "body" and turns:
            times = [Fraction(int(turns.group(1)), int(turns.group(2)))]
        elif role in _BRANCHES and branch:
            times = [Fraction(int(count), int(branch.group(2))) for count in branch.group(1).split("_")]
        yield from map(Call, called, times * (len(called) if len(times) == 1 else 1))
