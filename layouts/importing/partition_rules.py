"""Lists of (regular expression, PartitionSpec), as EasyLM and many training scripts for JAX keep them."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ...mesh.device_mesh import DeviceMesh
from ...mesh.errors import UserError
from .. import problems
from ..layout_map import LayoutMap
from ..paths import leaves_with_paths
from .exact import Entries, Renaming, check_pairs, check_unused, entries_of, exact_map


def from_partition_rules(
    rules: Iterable[tuple[str, Any]] | Mapping[str, Any],
    params: Any,
    mesh: DeviceMesh,
    *,
    axes: Renaming | None = None,
    unused: Literal["error", "ignore"] = "error",
) -> LayoutMap:
    """Lays parameters out by the first expression that is found in their path.

    A spec may have fewer entries than the parameter has dims: the others are whole. An array of one element is whole
    whatever rules say. A parameter that no expression is found in has no rule, so the strategy, or `layouts.unmatched`,
    decides.

    Args:
        rules: Pairs (regular expression, PartitionSpec); an expression may be found anywhere in a path.
        params: The parameters, or their shapes: leaves with a `shape`. Paths are joined by "/".
        mesh: The mesh of the map.
        axes: What mesh axes of the specs are called here, such as {"mp": "tensor"}; None for an axis that there is not.
        unused: What happens to an expression that is found in no path: "error" or "ignore".

    Returns:
        One rule for each parameter that some expression is found in.

    Raises:
        UserError: A rule is no such pair or no valid expression; an expression is found nowhere; a spec has more
            entries than the parameter has dims; a mesh axis is none of the mesh.
    """
    what = "from_partition_rules"
    check_unused(unused, what)
    pairs = check_pairs(rules, what, "(regular expression, PartitionSpec)")
    patterns = [(_compiled(key, what), entries_of(spec, f"{what}: rule {key!r}")) for key, spec in pairs]
    leaves = leaves_with_paths(params)
    found, wrong = {}, []
    for path, leaf in leaves:
        decided = next(((pattern, spec) for pattern, spec in patterns if pattern.search(path)), None)
        if decided is None:
            continue
        pattern, spec = decided
        if math.prod(leaf.shape) == 1:
            spec = ()
        if len(spec) > len(leaf.shape):
            wrong.append(
                f"{what}: rule {pattern.pattern!r} gives {spec}, {len(spec)} entries, to {path!r}, which has the shape "
                f"{tuple(leaf.shape)}: {len(leaf.shape)} dims. Make the expression more specific, or the spec shorter."
            )
        found[path] = _filled(spec, len(leaf.shape))
    if unused == "error":
        paths = [path for path, _ in leaves]
        wrong += [
            f"{what}: {problems.unused_rule(pattern.pattern, paths)} unused='ignore' passes over such rules."
            for pattern, _ in patterns
            if not any(map(pattern.search, paths))
        ]
    if wrong:
        raise UserError("\n".join(wrong))
    return exact_map(found, mesh, axes, what)


def _compiled(key: str, what: str) -> re.Pattern[str]:
    try:
        return re.compile(key)
    except re.error as error:
        raise UserError(f"{what}: rule {key!r} is not a valid regular expression: {error.msg}.") from error


def _filled(spec: Entries, num_dims: int) -> Entries:
    """A spec with an entry for each dim."""
    return spec + (None,) * (num_dims - len(spec))
