"""Flax's logical axes: every dim of a parameter has a name, and rules say which mesh axis splits dims of that name."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from ...mesh.device_mesh import DeviceMesh
from ...mesh.errors import UserError
from ...mesh.near_miss import nearest
from ..layout_map import LayoutMap
from ..paths import leaves_with_paths
from ..tensor_layout import AxisEntry
from .exact import Entries, Renaming, check_pairs, entries_of, exact_map, names_in

NAMES_OF = ("names", "sharding_names", "out_sharding", "sharding")
"""Where Flax's metadata keep the names of dims: Linen's boxes, NNX's variables."""
ALIKE = 0.8
"""How alike a name without a rule and a rule without a name are that one is taken for the other, misspelt."""


def from_flax_rules(
    rules: Iterable[tuple[str, Any]] | Mapping[str, Any], names: Any, mesh: DeviceMesh, *, axes: Renaming | None = None
) -> LayoutMap:
    """Lays parameters out by rules over logical axes, as `flax.linen.logical_to_mesh` does.

    Rules stand in order of priority. A rule gives its mesh axes to the dim of its name, unless that dim has some
    already or another dim of the array has taken one of them; None keeps the dim whole, whatever rules follow. A dim
    that no rule reaches is whole. Mesh axes that the mesh does not have are ignored, and a warning names them.

    Args:
        rules: Pairs (logical axis, mesh axis); a mesh axis is a name, a tuple of names, or None.
        names: A tree like the parameters: for each, the names of its dims as a tuple of texts and None, a PartitionSpec
            of them (what `flax.linen.get_partition_spec` gives), or metadata that has them (`names`, `sharding_names`,
            `out_sharding` or `sharding`). None instead of names leaves a parameter to the strategy.
        mesh: The mesh of the map.
        axes: What mesh axes of the rules are called here, such as {"model": "tensor"}; None for an axis that there is
            not.

    Returns:
        One rule for each parameter that has names.

    Raises:
        UserError: A rule is no such pair; the tree holds something else; an array has a name twice; a mesh axis nearly
            has the name of one of the mesh, or is renamed to one that is missing; a rule and a name without one differ
            by little.
    """
    return by_logical_axes(rules, names_by_path(names, "from_flax_rules"), mesh, axes, "from_flax_rules")


def by_logical_axes(
    rules: Any, named: Mapping[str, Sequence[str | None]], mesh: DeviceMesh, axes: Renaming | None, what: str
) -> LayoutMap:
    """The same for names by path; `what` is the function that was called."""
    pairs = [
        (logical, entries_of((entry,), f"{what}: rule {logical!r}")[0])
        for logical, entry in check_pairs(rules, what, "(logical axis, mesh axis)")
    ]
    problems = [*_repeated(named), *_misspelt(pairs, named)]
    if problems:
        raise UserError("\n".join(f"{what}: {problem}" for problem in problems))
    pairs = _without_surplus(pairs, named, mesh, axes or {}, what)
    return exact_map({path: _assigned(own, pairs) for path, own in named.items()}, mesh, axes, what)


def _without_surplus(
    rules: Sequence[tuple[str, AxisEntry]],
    named: Mapping[str, Sequence[str | None]],
    mesh: DeviceMesh,
    axes: Renaming,
    what: str,
) -> list[tuple[str, AxisEntry]]:
    """Returns the rules without mesh axes that the mesh lacks, and without rules of these alone; names them."""
    used = {name for names in named.values() for name in names}
    surplus: dict[str, None] = {}
    kept = []
    for logical, entry in rules:
        given = names_in(entry)
        missing = [name for name in given if name not in axes and _is_surplus(name, mesh)]
        if logical in used:
            surplus |= dict.fromkeys(missing)
        left = tuple(name for name in given if name not in missing)
        if left or not given:
            kept.append((logical, left if len(left) > 1 else left[0] if left else None))
    if surplus:
        warnings.warn(
            f"{what} ignored mesh axes of the rules that the mesh does not have: {', '.join(surplus)}. The mesh has "
            f"{', '.join(mesh.axis_names)}. To use one of these for it: axes={{{next(iter(surplus))!r}: "
            f"{mesh.axis_names[-1]!r}}}.",
            stacklevel=4,
        )
    return kept


def _is_surplus(name: str, mesh: DeviceMesh) -> bool:
    """Checks that an axis is not one of the mesh, nor one of these misspelled."""
    return name not in mesh.axis_names and not nearest(name, mesh.axis_names, cutoff=ALIKE)


def _assigned(names: Sequence[str | None], rules: Sequence[tuple[str, AxisEntry]]) -> Entries:
    """The mesh axes of each dim: rules in order, each axis once in an array."""
    entries: dict[int, AxisEntry] = {}
    for logical, entry in rules:
        if logical not in names:
            continue
        dim, taken = names.index(logical), {axis for each in entries.values() for axis in names_in(each)}
        if dim not in entries and not taken.intersection(names_in(entry)):
            entries[dim] = entry
    return tuple(entries.get(dim) for dim in range(len(names)))


def names_by_path(tree: Any, what: str) -> dict[str, tuple[str | None, ...]]:
    """Reads the names of the dims of every parameter.

    Args:
        tree: As `names` of `from_flax_rules`.
        what: The function that was called.

    Returns:
        Path -> names, of the parameters that have some.

    Raises:
        UserError: The tree holds something else.
    """
    found = {}
    for path, leaf in leaves_with_paths(tree, is_leaf=_is_named):
        names = _names_of(leaf)
        if names is not None:
            found[path] = names
        elif leaf is not None:
            raise UserError(
                f"{what}: {path!r} in the tree of names is {leaf!r} ({type(leaf).__name__}); give the names of its "
                "dims, such as ('embed', 'mlp'), or None to leave it to the strategy."
            )
    return found


def _is_named(node: Any) -> bool:
    return node is None or _names_of(node) is not None


def _names_of(node: Any) -> tuple[str | None, ...] | None:
    """The names of the dims of one parameter; None where a node is something else."""
    if isinstance(node, tuple | PartitionSpec):
        names = tuple(node)
        plain = type(node) is tuple or isinstance(node, PartitionSpec)
        return names if plain and all(name is None or isinstance(name, str) for name in names) else None
    if isinstance(node, Mapping | list):
        return None
    for attribute in NAMES_OF:
        names = getattr(node, attribute, None)
        if isinstance(names, tuple | PartitionSpec):
            return _names_of(tuple(names))
    return None


def _repeated(named: Mapping[str, Sequence[str | None]]) -> list[str]:
    found = []
    for path, names in named.items():
        twice = [name for name in dict.fromkeys(names) if name is not None and names.count(name) > 1]
        if twice:
            found.append(f"{path!r} has dims {tuple(names)}, two of them {twice[0]!r}. Give each dim its own name.")
    return found


def _misspelt(rules: Sequence[tuple[str, AxisEntry]], named: Mapping[str, Sequence[str | None]]) -> list[str]:
    """Names without a rule that are nearly those of a rule that no array has."""
    used = {name for names in named.values() for name in names if name is not None}
    ruled = {logical for logical, _ in rules}
    idle = sorted(ruled - used)
    near = {name: nearest(name, idle, cutoff=ALIKE) for name in sorted(used - ruled)}
    return [
        f"no rule is for the logical axis {name!r}, and no array has {own[0]!r}, which a rule is for. Correct one of "
        f"them, or add the rule ({name!r}, None), which keeps these dims whole."
        for name, own in near.items()
        if own
    ]
