"""Layout rules of other libraries as a `LayoutMap`: Flax's logical axes, Keras's LayoutMap, Hugging Face's `tp_plan`.

The libraries need not be installed: their objects are read by their attributes. Rules that a layout cannot express are
errors. `from_flax_rules` and `from_tp_plan` return one rule for each parameter, whose key is its path.
"""

import re
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Literal, TypeAlias

from jax.sharding import PartitionSpec

from ..mesh.device_mesh import DeviceMesh
from ..mesh.errors import UserError, did_you_mean, raise_problems
from . import problems
from .layout_map import LayoutMap, MatchMode
from .paths import leaves_with_paths
from .tensor_layout import AxisEntry, TensorLayout, make_entry, names_of

Entries: TypeAlias = tuple[AxisEntry, ...]
"""One entry for each dim: None, a mesh axis, or several."""
Renaming: TypeAlias = Mapping[str, str | None]
"""Mesh axis in the rules -> its name in the mesh, or None if the mesh lacks it."""

NAMES_OF = ("names", "sharding_names", "out_sharding", "sharding")
"""Attributes of Flax's metadata with the names of dims: Linen's boxes, NNX's variables."""

TP_STYLES = {
    "colwise": "columns",
    "colwise_rep": "columns",
    "colwise_gather_output": "columns",
    "local_colwise": "columns",
    "rowwise": "rows",
    "rowwise_rep": "rows",
    "rowwise_split_input": "rows",
    "local_rowwise": "rows",
    "embedding_rowwise": "first",
    "vocab_parallel_rowwise": "first",
    "grouped_gemm": "first",
    "embedding_colwise": "last",
    "replicate": "whole",
    "replicated_with_grad_allreduce": "whole",
    "sequence_parallel": "whole",
    "gather": "whole",
    "all_reduce": "whole",
    "mla_kv_a_proj": "whole",
    "moe_tp_experts": "whole",
    "moe_identity_expert": "whole",
    "ep_router": "whole",
    "ep_dispatch_experts": "whole",
    "local": "whole",
    "local_params": "whole",
}
"""Style -> the split dim of a matrix. The last nine are hooks of modules."""
IN_OUT = ("kernel", "w")
"""Names of matrices that are stored (in, out), as in JAX libraries; all others are (out, in)."""


def from_flax_rules(
    rules: Iterable[tuple[str, Any]] | Mapping[str, Any], names: Any, mesh: DeviceMesh, *, axes: Renaming | None = None
) -> LayoutMap:
    """Converts rules for logical axes, as `flax.linen.logical_to_mesh` applies them.

    Rules are in order of priority. A rule assigns its mesh axes to the dim of its name, unless that dim has axes
    already or another dim of the array uses one of them; None keeps the dim whole, whatever rules follow. A dim without
    a rule is whole. Mesh axes that the mesh does not have are ignored with a warning.

    Args:
        rules: Pairs (logical axis, mesh axis); a mesh axis is a name, a tuple of names, or None.
        names: A tree like the parameters, with the names of each parameter's dims: a tuple of strings and None, a
            PartitionSpec of them (the result of `flax.linen.get_partition_spec`), or metadata with an attribute
            `names`, `sharding_names`, `out_sharding` or `sharding`. None leaves a parameter to the strategy.
        mesh: The mesh of the map.
        axes: New names of mesh axes, such as {"model": "tensor"}; None for an axis to ignore.

    Returns:
        One rule for each parameter that has names.

    Raises:
        UserError: A rule or the tree is invalid; an array uses a name twice; an axis is renamed to a missing one.
    """
    origin = "from_flax_rules"
    dim_names = _dim_names(names, origin)
    used: set[str | None] = set()
    for names_of_parameter in dim_names.values():
        used.update(names_of_parameter)
    known_axes = {*mesh.axis_names, *(axes or {})}
    pairs: list[tuple[Any, AxisEntry]] = []
    ignored: dict[str, None] = {}
    for pair in rules.items() if isinstance(rules, Mapping) else rules:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UserError(f"{origin}: a rule must be a pair (logical axis, mesh axis), got {pair!r}.")
        logical, mesh_axes = pair
        entry = _parse_entries((mesh_axes,), f"{origin}: rule {logical!r}")[0]
        rule_axes = names_of(entry)
        known = [name for name in rule_axes if name in known_axes]
        unknown = [name for name in rule_axes if name not in known_axes]
        if logical in used:
            ignored |= dict.fromkeys(unknown)
        if known or not rule_axes:
            pairs.append((logical, make_entry(known)))
    if ignored:
        warnings.warn(
            f"{origin} ignored mesh axes of the rules that the mesh does not have: {', '.join(ignored)}. The mesh has "
            f"{', '.join(mesh.axis_names)}. To rename one: axes={{{next(iter(ignored))!r}: {mesh.axis_names[-1]!r}}}.",
            stacklevel=2,
        )
    entries = {path: _assign_axes(names, pairs) for path, names in dim_names.items()}
    return _exact_map(entries, mesh, axes, origin)


def from_keras(
    layout_map: Any, mesh: DeviceMesh | None = None, *, axes: Renaming | None = None, match: MatchMode = "fullmatch"
) -> LayoutMap:
    """Converts a `keras.distribution.LayoutMap`: the same keys in the same order.

    Lookup follows Keras 3.14 and later: the key that equals the path, or else the one key that matches the whole path.
    Keys of Keras begin with the name of the model ("sequential/dense/kernel"), or with ".*".

    Args:
        layout_map: The map.
        mesh: The mesh of the result; None converts Keras's mesh.
        axes: New names of mesh axes, such as {"model": "tensor"}; None for an axis to ignore.
        match: "search" for rules written for Keras before 3.14.

    Raises:
        UserError: The map, a key or a layout is invalid, or the mesh does not have an axis.
    """
    if not hasattr(layout_map, "items"):
        raise UserError(
            f"from_keras takes a keras.distribution.LayoutMap, got {layout_map!r} ({type(layout_map).__name__})."
        )
    entries_of_rules: dict[str, Entries] = {}
    for key, layout in layout_map.items():
        spec = layout if isinstance(layout, tuple) else layout.axes
        entries_of_rules[key] = _parse_entries(spec, f"from_keras: rule {key!r}")
    if mesh is None:
        mesh = _as_device_mesh(layout_map.device_mesh)
    rules = LayoutMap(mesh, match)
    for key, entries in _rename_axes(entries_of_rules, mesh, axes, "from_keras").items():
        rules[key] = TensorLayout(entries)
    return rules


def _as_device_mesh(mesh: Any) -> DeviceMesh:
    """Returns the mesh for a mesh of Keras."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    return DeviceMesh(tuple(mesh.shape), tuple(mesh.axis_names), mesh.devices)


def from_tp_plan(
    plan: Mapping[str, str],
    params: Any,
    mesh: DeviceMesh,
    *,
    axis: str = "tensor",
    prefix: str = "model",
    unused: Literal["error", "ignore"] = "error",
) -> LayoutMap:
    """Converts a `tp_plan` of `transformers`.

        style                                                  a matrix, as in torch (out, in)         its bias
        colwise, colwise_rep, colwise_gather_output            out is split                            split
        rowwise, rowwise_rep, rowwise_split_input              in is split                             whole
        local_colwise, local_rowwise                           as without "local_"
        embedding_rowwise, vocab_parallel_rowwise              the vocabulary is split (dim 0)
        embedding_colwise                                      the width is split (dim 1)
        grouped_gemm                                           experts are split (dim 0)
        replicate, sequence_parallel, and module hooks:        whole                                   whole
        gather, all_reduce, ...

    The styles of one line differ only in where activations are gathered. Here XLA decides that from the layouts of the
    parameters (`strategy.tensor.explicit: false`, or `ModelParallel`); the numbers are the same.

    Args:
        plan: Name of a module or parameter, with `*` for each number -> style, such as
            `{"layers.*.self_attn.q_proj": "colwise"}`; from `config.base_model_tp_plan` or a model's `_tp_plan`.
        params: The parameters, or their shapes, with the names of `transformers`, joined by "/" or ".". A matrix named
            `kernel` or `w` is (in, out); any other is (out, in), as in torch. Leading dims may count blocks.
        mesh: The mesh of the map.
        axis: The mesh axis that splits.
        prefix: An optional prefix of names, which plans of a base model omit.
        unused: "ignore" accepts names without a parameter, for plans that serve several models.

    Returns:
        One rule for each parameter in the plan; the others are left to the strategy.

    Raises:
        UserError: A style is unknown, or splits several matrices packed into one array, which a layout cannot express;
            a name matches no parameter; the mesh does not have the axis.
    """
    origin = "from_tp_plan"
    wrong: list[str] = []
    for key, style in plan.items():
        problem = _style_problem(key, style)
        if problem is not None:
            wrong.append(f"{origin}: {problem}")
    leaves = leaves_with_paths(params)
    patterns = {key: _plan_pattern(key, prefix) for key in plan}
    entries: dict[str, Entries] = {}
    used: set[str] = set()
    for path, leaf in leaves:
        words = path.replace("/", ".").split(".")
        keys_of_names = _keys_of_names(words, patterns)
        for keys in keys_of_names:
            used.update(keys)
        deciding = list(chain.from_iterable(keys_of_names[:2]))  # of the parameter, or of its module
        if deciding:
            split = TP_STYLES.get(plan[deciding[0]], "whole")
            entries[path] = _split_dim(split, words[-1], len(leaf.shape), axis)
    if unused == "error":
        paths = [path for path, _ in leaves]
        unused_keys = [key for key in plan if key not in used]
        for key in unused_keys:
            nearest = problems.nearest_path(key.replace(".", "/"), paths)
            wrong.append(
                f"{origin}: {key!r} in the plan matches no parameter. The nearest path is {nearest!r}. Correct or "
                f"remove it, or set the prefix of names (prefix={prefix!r}); unused='ignore' accepts such names."
            )
    raise_problems(wrong)
    return _exact_map(entries, mesh, None, origin)


def _keys_of_names(words: list[str], patterns: Mapping[str, re.Pattern[str]]) -> list[list[str]]:
    """Returns the keys of a plan that match a parameter, then those that match its module, then the outer modules.

    Args:
        words: The name of the parameter, split at its dots.
        patterns: Key of the plan -> its pattern.
    """
    keys = []
    for count in range(len(words), 0, -1):
        name = ".".join(words[:count])
        keys.append([key for key, pattern in patterns.items() if pattern.fullmatch(name)])
    return keys


def _exact_map(
    entries_of_paths: Mapping[str, Entries], mesh: DeviceMesh, axes: Renaming | None, origin: str
) -> LayoutMap:
    """Returns a map with one rule for each path, which matches only that path."""
    rules = LayoutMap(mesh)
    for path, entries in _rename_axes(entries_of_paths, mesh, axes, origin).items():
        rules[re.escape(path)] = TensorLayout(entries)
    return rules


def _rename_axes(
    entries_of_rules: Mapping[str, Entries], mesh: DeviceMesh, axes: Renaming | None, origin: str
) -> dict[str, Entries]:
    """Returns the entries with the axis names of the mesh; an axis that is renamed to None is dropped.

    Raises:
        UserError: The mesh does not have an axis, or `axes` has a name without a rule; all of them at once.
    """
    axes = axes or {}
    used: dict[str, None] = {}
    for entries in entries_of_rules.values():
        for entry in entries:
            used |= dict.fromkeys(names_of(entry))
    wrong = []
    for name in used:
        renamed = axes.get(name, name)
        if renamed is not None and renamed not in mesh.axis_names:
            wrong.append(
                f"{origin}: unknown mesh axis {renamed!r} in the rules; the mesh has "
                f"{', '.join(mesh.axis_names)}. Rename it, axes={{{name!r}: {mesh.axis_names[-1]!r}}}, or keep its "
                f"dims whole, axes={{{name!r}: None}}."
            )
    for name in axes:
        if used and name not in used:
            listed = ", ".join(map(repr, used))
            wrong.append(f"{origin}: axes renames {name!r}, but the applied rules only have {listed}.")
    raise_problems(wrong)

    def rename(entry: AxisEntry) -> AxisEntry:
        renamed = [axes.get(name, name) for name in names_of(entry)]
        return make_entry([name for name in renamed if name is not None])

    return {key: tuple(map(rename, entries)) for key, entries in entries_of_rules.items()}


def _parse_entries(spec: Any, origin: str) -> Entries:
    """Returns the entries of a PartitionSpec or of a tuple; `origin` is for messages."""
    try:
        return TensorLayout(spec).axes
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None


def _dim_names(tree: Any, origin: str) -> dict[str, tuple[str | None, ...]]:
    """Returns path -> names of the dims, for the parameters that have names."""
    dim_names = {}
    for path, leaf in leaves_with_paths(tree, is_leaf=lambda node: node is None or _names_of(node) is not None):
        names = _names_of(leaf)
        if leaf is None:
            continue
        if names is None:
            raise UserError(
                f"{origin}: {path!r} in the tree of names must be the names of its dims, such as ('embed', 'mlp'), or "
                f"None to leave it to the strategy, got {leaf!r} ({type(leaf).__name__})."
            )
        repeated = [name for name in names if name is not None and names.count(name) > 1]
        if repeated:
            raise UserError(
                f"{origin}: {path!r} has dims {names}, two of them {repeated[0]!r}. Give each its own name."
            )
        dim_names[path] = names
    return dim_names


def _names_of(node: Any) -> tuple[str | None, ...] | None:
    """Returns the names of the dims of a node of a tree, or None if the node is not names or metadata with names."""
    if type(node) is tuple or isinstance(node, PartitionSpec):
        names = tuple(node)
        are_names = all(name is None or isinstance(name, str) for name in names)
        return names if are_names else None
    if isinstance(node, Mapping | list | tuple):
        return None
    for attribute in NAMES_OF:
        names = getattr(node, attribute, None)
        if isinstance(names, tuple | PartitionSpec):
            return _names_of(tuple(names))
    return None


def _assign_axes(names: tuple[str | None, ...], rules: Iterable[tuple[str, AxisEntry]]) -> Entries:
    """Returns the mesh axes of each dim: rules in order, each axis once in an array."""
    entries: dict[int, AxisEntry] = {}
    taken: set[str] = set()
    for logical, entry in rules:
        if logical not in names:
            continue
        dim = names.index(logical)
        axes = names_of(entry)
        if dim in entries or taken.intersection(axes):
            continue
        entries[dim] = entry
        taken.update(axes)
    return tuple(entries.get(dim) for dim in range(len(names)))


def _style_problem(key: str, style: str) -> str | None:
    if style in TP_STYLES:
        return None
    if "packed" in style:
        return (
            f"{key!r} is {style!r}: several matrices in one array, each split by itself, so that a device holds "
            "several ranges of a dim. A layout can only give it one. Store the matrices as separate "
            "parameters, or remove this entry."
        )
    return f"{key!r}: unknown style {style!r}.{did_you_mean(style, TP_STYLES, otherwise='Known styles:')}"


def _plan_pattern(key: str, prefix: str) -> re.Pattern[str]:
    """Returns the pattern of a name: `*` is a number, and the prefix is optional."""
    words = key.split(".")
    if prefix and words[0] == prefix:
        words = words[1:]
    patterns = [r"\d+" if word == "*" else re.escape(word) for word in words]
    optional_prefix = rf"(?:{re.escape(prefix)}\.)?" if prefix else ""
    return re.compile(optional_prefix + r"\.".join(patterns))


def _split_dim(split: str, leaf: str, num_dims: int, axis: str) -> Entries:
    """Returns the entries of one array of a module."""
    whole = (None,) * num_dims
    if split == "whole" or num_dims == 0 or (split == "rows" and leaf == "bias"):
        return whole
    entries: list[AxisEntry] = list(whole)
    entries[_dim_to_split(split, leaf, num_dims)] = axis
    return tuple(entries)


def _dim_to_split(split: str, leaf: str, num_dims: int) -> int:
    """Returns the dim that a style splits, counted from the end for matrices with leading dims."""
    if split == "first":
        return 0
    is_vector = leaf == "bias" or num_dims == 1
    if split == "last" or is_vector:
        return -1
    is_in_out = leaf in IN_OUT
    if split == "columns":
        return -1 if is_in_out else -2
    return -2 if is_in_out else -1
