"""A LayoutMap that names every parameter by its path, on a mesh whose axes may have other names than the rules say."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from jax.sharding import PartitionSpec

from ...mesh.device_mesh import DeviceMesh
from ...mesh.errors import UserError
from ...mesh.near_miss import nearest
from ..layout_map import LayoutMap
from ..tensor_layout import AxisEntry, TensorLayout

Entries: TypeAlias = tuple[AxisEntry, ...]
"""One entry for each dim: None, a mesh axis, or several."""

Renaming: TypeAlias = Mapping[str, str | None]
"""Name of a mesh axis in the rules -> its name in the mesh, or None where the mesh has nothing of the kind."""


def exact_map(found: Mapping[str, Entries], mesh: DeviceMesh, axes: Renaming | None, what: str) -> LayoutMap:
    """Makes the map.

    Args:
        found: Path of a parameter -> its entries, in the words of the rules.
        mesh: The mesh of the map.
        axes: Other names for axes; an axis that stands for None leaves its dims whole.
        what: The function that was called, for messages.

    Returns:
        One rule for each path, which matches that path alone.

    Raises:
        UserError: An axis is not one of the mesh; all of them at once.
    """
    rules = LayoutMap(mesh)
    for path, entries in in_mesh(found, mesh, axes, what).items():
        rules[re.escape(path)] = TensorLayout(entries)
    return rules


def in_mesh(found: Mapping[str, Entries], mesh: DeviceMesh, axes: Renaming | None, what: str) -> dict[str, Entries]:
    """Says the entries in the names of the mesh; arguments and errors are those of `exact_map`."""
    axes = axes or {}
    wrong = list(_axis_problems(found, tuple(mesh.axis_names), axes, what))
    if wrong:
        raise UserError("\n".join(wrong))
    return {path: tuple(_renamed(entry, axes) for entry in entries) for path, entries in found.items()}


def entries_of(spec: object, what: str) -> Entries:
    """Reads a PartitionSpec, or a tuple or list of its entries.

    Args:
        spec: The spec; an entry is None, the name of an axis, or a tuple or list of names.
        what: What the spec is of, for messages: "Rule 'kernel'".

    Raises:
        UserError: It is none of these, or leaves a dim to the compiler (`PartitionSpec.UNCONSTRAINED`).
    """
    if isinstance(spec, str) or not isinstance(spec, PartitionSpec | Sequence):
        raise UserError(
            f"{what} gives {spec!r} ({type(spec).__name__}); a layout is a PartitionSpec or a tuple, with one entry "
            "for each dim: None, the name of a mesh axis, or a tuple of names."
        )
    return tuple(_entry(entry, spec, what) for entry in spec)


def names_in(entry: AxisEntry) -> tuple[str, ...]:
    """The axes of one entry; () of a whole dim."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry


def check_unused(unused: str, what: str) -> None:
    """Refuses other words for what happens to rules that meet nothing than "error" and "ignore"."""
    if unused not in ("error", "ignore"):
        raise UserError(f"{what}: unused={unused!r}; it is 'error' or 'ignore'.")


def check_pairs(rules: object, what: str, of: str) -> list[tuple[str, object]]:
    """Reads a list of pairs that begin with a text.

    Args:
        rules: The pairs, in order.
        what: The function that was called.
        of: What a pair holds: "(logical axis, mesh axis)".

    Raises:
        UserError: There is something else in it, with its place.
    """
    pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise UserError(f"{what} got rules {rules!r} ({type(rules).__name__}): give a list of pairs {of}.")
    read = []
    for place, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise UserError(f"{what}: rule {place} is {pair!r}; each rule is a pair {of}.")
        read.append((pair[0], pair[1]))
    return read


def _entry(entry: object, spec: object, what: str) -> AxisEntry:
    if entry is None or isinstance(entry, str):
        return entry
    if entry is PartitionSpec.UNCONSTRAINED:
        raise UserError(
            f"{what} gives {spec}, which leaves a dim to the compiler (UNCONSTRAINED): the layout of a parameter says "
            "where every part of it is. Write None for a whole dim, or a mesh axis."
        )
    if isinstance(entry, tuple | list) and all(isinstance(name, str) for name in entry):
        return tuple(entry) if len(entry) > 1 else (entry[0] if entry else None)
    raise UserError(f"{what} gives {spec!r}: an entry is None, the name of a mesh axis, or a tuple of names.")


def _renamed(entry: AxisEntry, axes: Renaming) -> AxisEntry:
    """One entry in the names of the mesh; an axis that stands for None drops out."""
    kept = [name for name in (axes.get(each, each) for each in names_in(entry)) if name is not None]
    return tuple(kept) if len(kept) > 1 else (kept[0] if kept else None)


def _axis_problems(found: Mapping[str, Entries], known: tuple[str, ...], axes: Renaming, what: str) -> Iterator[str]:
    first: dict[str, str] = {}
    for path, entries in found.items():
        for name in (name for entry in entries for name in names_in(entry)):
            first.setdefault(name, path)
    for name, path in first.items():
        own = axes.get(name, name)
        if own is not None and own not in known:
            wish = (nearest(own, known) or [known[-1]])[0]
            yield (
                f"{what}: the rules lay {path!r} out over the mesh axis {own!r}; the mesh has {', '.join(known)}. Say "
                f"which axis is meant, axes={{{name!r}: {wish!r}}}, or axes={{{name!r}: None}} to leave its dims whole."
            )
    unused = [name for name in axes if name not in first]
    if unused and first:
        yield (
            f"{what}: axes renames {', '.join(map(repr, unused))}, which no rule that decides something names; the "
            f"rules name {', '.join(map(repr, first))}. Correct it or leave it out."
        )
