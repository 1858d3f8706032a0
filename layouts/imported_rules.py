"""Layout rules of other libraries as a `LayoutMap`: Flax's logical axes, Keras's LayoutMap, Hugging Face's `tp_plan`.

The libraries need not be installed: their objects are read by their attributes. Rules that a layout cannot express are
errors. `from_flax_rules` and `from_tp_plan` return one rule for each parameter, whose key is its path.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from jax.sharding import PartitionSpec

from ..mesh.device_mesh import DeviceMesh
from ..mesh.errors import UserError, did_you_mean, nearest
from . import problems
from .layout_map import LayoutMap, MatchMode
from .paths import leaves_with_paths
from .tensor_layout import AxisEntry, TensorLayout

Entries: TypeAlias = tuple[AxisEntry, ...]
"""One entry for each dim: None, a mesh axis, or several."""
Renaming: TypeAlias = Mapping[str, str | None]
"""Mesh axis in the rules -> its name in the mesh, or None if the mesh lacks it."""

NAMES_OF = ("names", "sharding_names", "out_sharding", "sharding")
"""Attributes of Flax's metadata with the names of dims: Linen's boxes, NNX's variables."""
MIN_SIMILARITY = 0.8
"""The similarity from which two names are assumed to be a typo of each other."""

COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output", "local_colwise")
ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise")
FIRST = ("embedding_rowwise", "vocab_parallel_rowwise", "grouped_gemm")
LAST = ("embedding_colwise",)
HOOKS = ("gather", "all_reduce", "mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert", "ep_router")
HOOKS += ("ep_dispatch_experts", "local", "local_params")
WHOLE = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel", *HOOKS)
TP_STYLES = (*COLUMNS, *ROWS, *FIRST, *LAST, *WHOLE)
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
        UserError: A rule or the tree is invalid; an array uses a name twice; a mesh axis is a likely typo or renamed to
            a missing one; a name without a rule is a likely typo.
    """
    what = "from_flax_rules"
    pairs = [
        (logical, _parse_entries((entry,), f"{what}: rule {logical!r}")[0]) for logical, entry in _pairs(rules, what)
    ]
    named = _dim_names(names, what)
    wrong = [*_repeated_names(named), *_misspelled_names(pairs, named)]
    if wrong:
        raise UserError("\n".join(f"{what}: {problem}" for problem in wrong))
    pairs = _without_unknown_axes(pairs, named, mesh, axes or {}, what)
    return _exact_map({path: _assign_axes(own, pairs) for path, own in named.items()}, mesh, axes, what)


def from_keras(
    layout_map: Any, mesh: DeviceMesh | None = None, *, axes: Renaming | None = None, match: MatchMode = "fullmatch"
) -> LayoutMap:
    """Converts a `keras.distribution.LayoutMap`: the same keys in the same order.

    Lookup follows Keras 3.14 and later: the key that equals the path, or else the one key that matches the whole path.
    Keys of Keras begin with the name of the model ("sequential/dense/kernel"), or with ".*".

    Args:
        layout_map: The map, or an object with a `device_mesh` and with `items()` of keys and layouts that have `axes`.
        mesh: The mesh of the result; None converts Keras's mesh.
        axes: New names of mesh axes, such as {"model": "tensor"}; None for an axis to ignore.
        match: "search" for rules written for Keras before 3.14.

    Raises:
        UserError: The map, a key or a layout is invalid, or the mesh does not have an axis.
    """
    items: Any = getattr(layout_map, "items", None)
    if not callable(items):
        raise UserError(
            f"from_keras takes a keras.distribution.LayoutMap, got {layout_map!r} ({type(layout_map).__name__})."
        )
    given = {}
    for key, layout in items():  # pyright: ignore[reportGeneralTypeIssues]
        entries = layout if isinstance(layout, tuple) else getattr(layout, "axes", None)
        given[key] = _parse_entries(entries, f"from_keras: rule {key!r}")
    rules = LayoutMap(_keras_mesh(layout_map) if mesh is None else mesh, match)
    for key, entries in _rename_axes(given, rules.device_mesh, axes, "from_keras").items():
        rules[key] = TensorLayout(entries)
    return rules


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
    what = "from_tp_plan"
    if unused not in ("error", "ignore"):
        raise UserError(f"{what}: unused must be 'error' or 'ignore', got {unused!r}.")
    wrong = [f"{what}: {problem}" for key, style in plan.items() if (problem := _style_problem(key, style))]
    leaves = leaves_with_paths(params)
    patterns = {key: _plan_pattern(key, prefix) for key in plan}
    found: dict[str, Entries] = {}
    used: set[str] = set()
    for path, leaf in leaves:
        words = path.replace("/", ".").split(".")
        modules = [".".join(words[:count]) for count in range(1, len(words) + 1)]  # outermost first, then the parameter
        matches = {name: [key for key, each in patterns.items() if each.fullmatch(name)] for name in modules}
        used.update(key for keys in matches.values() for key in keys)
        keys = [*matches[modules[-1]], *(matches[modules[-2]] if len(modules) > 1 else [])]
        if keys:
            found[path] = _split_dim(plan[keys[0]], words[-1], len(leaf.shape), axis)
    for key in plan if unused == "error" else ():
        if key not in used:
            near = problems.nearest_path(key.replace(".", "/"), [path for path, _ in leaves])
            wrong.append(
                f"{what}: {key!r} in the plan matches no parameter. "
                f"{'' if near is None else f'The nearest path is {near!r}. '}Correct or remove it, or set the prefix "
                f"of names (prefix={prefix!r}); unused='ignore' accepts such names."
            )
    if wrong:
        raise UserError("\n".join(wrong))
    return _exact_map(found, mesh, None, what)


def _exact_map(found: Mapping[str, Entries], mesh: DeviceMesh, axes: Renaming | None, what: str) -> LayoutMap:
    """Returns a map with one rule for each path, which matches only that path."""
    rules = LayoutMap(mesh)
    for path, entries in _rename_axes(found, mesh, axes, what).items():
        rules[re.escape(path)] = TensorLayout(entries)
    return rules


def _rename_axes(
    found: Mapping[str, Entries], mesh: DeviceMesh, axes: Renaming | None, what: str
) -> dict[str, Entries]:
    """Returns the entries with the axis names of the mesh; an axis that is renamed to None is dropped.

    Raises:
        UserError: The mesh does not have an axis, or `axes` has a name without a rule; all of them at once.
    """
    axes = axes or {}
    wrong = list(_axis_problems(found, tuple(mesh.axis_names), axes, what))
    if wrong:
        raise UserError("\n".join(wrong))

    def rename(entry: AxisEntry) -> AxisEntry:
        return _as_entry([name for each in _axes_of(entry) if (name := axes.get(each, each)) is not None])

    return {path: tuple(map(rename, entries)) for path, entries in found.items()}


def _axis_problems(found: Mapping[str, Entries], known: tuple[str, ...], axes: Renaming, what: str) -> Iterator[str]:
    first: dict[str, str] = {}
    for path, entries in found.items():
        for name in (name for entry in entries for name in _axes_of(entry)):
            first.setdefault(name, path)
    for name, path in first.items():
        own = axes.get(name, name)
        if own is not None and own not in known:
            wish = (nearest(own, known) or [known[-1]])[0]
            yield (
                f"{what}: unknown mesh axis {own!r} in the rules, for {path!r}; the mesh has {', '.join(known)}. "
                f"Rename it, axes={{{name!r}: {wish!r}}}, or keep its dims whole, axes={{{name!r}: None}}."
            )
    unused = [name for name in axes if name not in first]
    if unused and first:
        yield (
            f"{what}: axes renames {', '.join(map(repr, unused))}, but the applied rules only have "
            f"{', '.join(map(repr, first))}. Correct or remove it."
        )


def _parse_entries(spec: object, what: str) -> Entries:
    """Parses a PartitionSpec, or a tuple or list of its entries.

    Args:
        spec: The spec; an entry is None, the name of an axis, or a tuple or list of names.
        what: Its origin, for messages: "Rule 'kernel'".

    Raises:
        UserError: It is invalid, or leaves a dim to the compiler (`PartitionSpec.UNCONSTRAINED`).
    """
    rule = "a PartitionSpec or a tuple with one entry for each dim: None, the name of a mesh axis, or a tuple of names"
    if isinstance(spec, str) or not isinstance(spec, PartitionSpec | Sequence):
        raise UserError(f"{what} must be {rule}, got {spec!r} ({type(spec).__name__}).")
    entries: list[AxisEntry] = []
    for entry in spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            raise UserError(
                f"{what} gives {spec}, which leaves a dim to the compiler (UNCONSTRAINED), but the layout of a "
                "parameter must be complete. Write None for a whole dim, or a mesh axis."
            )
        if entry is None or isinstance(entry, str):
            entries.append(entry)
        elif isinstance(entry, tuple | list) and all(isinstance(name, str) for name in entry):
            entries.append(_as_entry(entry))
        else:
            raise UserError(f"{what} must be {rule}, got {spec!r}.")
    return tuple(entries)


def _axes_of(entry: AxisEntry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _as_entry(names: Sequence[str]) -> AxisEntry:
    return tuple(names) if len(names) > 1 else (names[0] if names else None)


def _pairs(rules: object, what: str) -> list[tuple[str, object]]:
    """Parses pairs (logical axis, mesh axis)."""
    pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise UserError(f"{what}: rules must be pairs (logical axis, mesh axis), got {rules!r}.")
    read = []
    for place, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise UserError(f"{what}: rule {place} must be a pair (logical axis, mesh axis), got {pair!r}.")
        read.append((pair[0], pair[1]))
    return read


def _dim_names(tree: Any, what: str) -> dict[str, tuple[str | None, ...]]:
    """Returns path -> names of the dims, for the parameters that have names."""
    found = {}
    for path, leaf in leaves_with_paths(tree, is_leaf=lambda node: node is None or _names_of(node) is not None):
        names = _names_of(leaf)
        if names is not None:
            found[path] = names
        elif leaf is not None:
            raise UserError(
                f"{what}: {path!r} in the tree of names must be the names of its dims, such as ('embed', 'mlp'), or "
                f"None to leave it to the strategy, got {leaf!r} ({type(leaf).__name__})."
            )
    return found


def _names_of(node: Any) -> tuple[str | None, ...] | None:
    if type(node) is tuple or isinstance(node, PartitionSpec):
        names = tuple(node)
        return names if all(name is None or isinstance(name, str) for name in names) else None
    if isinstance(node, Mapping | list | tuple):
        return None
    for attribute in NAMES_OF:
        names = getattr(node, attribute, None)
        if isinstance(names, tuple | PartitionSpec):
            return _names_of(tuple(names))
    return None


def _repeated_names(named: Mapping[str, Sequence[str | None]]) -> Iterator[str]:
    for path, names in named.items():
        twice = [name for name in dict.fromkeys(names) if name is not None and names.count(name) > 1]
        if twice:
            yield f"{path!r} has dims {tuple(names)}, two of them {twice[0]!r}. Give each dim its own name."


def _misspelled_names(
    rules: Sequence[tuple[str, AxisEntry]], named: Mapping[str, Sequence[str | None]]
) -> Iterator[str]:
    used = {name for names in named.values() for name in names if name is not None}
    ruled = {logical for logical, _ in rules}
    for name in sorted(used - ruled):
        near = nearest(name, sorted(ruled - used), cutoff=MIN_SIMILARITY)
        if near:
            yield (
                f"the logical axis {name!r} lacks a rule, and the rule for {near[0]!r} lacks an array. Correct one of "
                f"them, or add the rule ({name!r}, None), which keeps these dims whole."
            )


def _without_unknown_axes(
    rules: Sequence[tuple[str, AxisEntry]],
    named: Mapping[str, Sequence[str | None]],
    mesh: DeviceMesh,
    axes: Renaming,
    what: str,
) -> list[tuple[str, AxisEntry]]:
    """Returns the rules without mesh axes that the mesh lacks, and without rules of only these; warns about them."""
    used = {name for names in named.values() for name in names}
    ignored: dict[str, None] = {}
    kept = []
    for logical, entry in rules:
        given = _axes_of(entry)
        missing = [
            name
            for name in given
            if name not in (*axes, *mesh.axis_names) and not nearest(name, mesh.axis_names, cutoff=MIN_SIMILARITY)
        ]
        if logical in used:
            ignored |= dict.fromkeys(missing)
        left = [name for name in given if name not in missing]
        if left or not given:
            kept.append((logical, _as_entry(left)))
    if ignored:
        warnings.warn(
            f"{what} ignored mesh axes of the rules that the mesh does not have: {', '.join(ignored)}. The mesh has "
            f"{', '.join(mesh.axis_names)}. To rename one: axes={{{next(iter(ignored))!r}: {mesh.axis_names[-1]!r}}}.",
            stacklevel=3,
        )
    return kept


def _assign_axes(names: Sequence[str | None], rules: Sequence[tuple[str, AxisEntry]]) -> Entries:
    """Returns the mesh axes of each dim: rules in order, each axis once in an array."""
    entries: dict[int, AxisEntry] = {}
    for logical, entry in rules:
        if logical in names:
            dim, taken = names.index(logical), {axis for each in entries.values() for axis in _axes_of(each)}
            if dim not in entries and not taken.intersection(_axes_of(entry)):
                entries[dim] = entry
    return tuple(entries.get(dim) for dim in range(len(names)))


def _keras_mesh(layout_map: Any) -> DeviceMesh:
    mesh = getattr(layout_map, "device_mesh", None)
    if isinstance(mesh, DeviceMesh):
        return mesh
    parts: Any = [getattr(mesh, name, None) for name in ("shape", "axis_names", "devices")]
    if any(part is None for part in parts):
        raise UserError(
            f"from_keras: the map's device_mesh must have shape, axis_names and devices, got {mesh!r}. Pass a mesh: "
            "from_keras(layout_map, mesh)."
        )
    shape, names, devices = parts
    return DeviceMesh(tuple(shape), tuple(names), devices)


def _style_problem(key: str, style: object) -> str | None:
    if style in TP_STYLES:
        return None
    if isinstance(style, str) and "packed" in style:
        return (
            f"{key!r} is {style!r}: several matrices in one array, each split by itself, so that a device holds "
            "several ranges of a dim. A layout can only give it one. Store the matrices as separate "
            "parameters, or remove this entry."
        )
    return f"{key!r}: unknown style {style!r}.{did_you_mean(style, TP_STYLES, otherwise='Known styles:')}"


def _plan_pattern(key: str, prefix: str) -> re.Pattern[str]:
    """Returns the pattern of a name: `*` is a number, and the prefix is optional."""
    words = [r"\d+" if word == "*" else re.escape(word) for word in key.split(".")]
    if prefix and key.split(".")[0] == prefix:
        words = words[1:]
    return re.compile((f"(?:{re.escape(prefix)}\\.)?" if prefix else "") + r"\.".join(words))


def _split_dim(style: str, leaf: str, num_dims: int, axis: str) -> Entries:
    """Returns the entries of one array of a module."""
    dim: int | None = None
    if style in FIRST:
        dim = 0
    elif style in LAST:
        dim = -1
    elif style in COLUMNS:
        dim = -1 if leaf in IN_OUT or leaf == "bias" or num_dims == 1 else -2
    elif style in ROWS and leaf != "bias":
        dim = -2 if leaf in IN_OUT and num_dims > 1 else -1
    if dim is None or not num_dims:
        return (None,) * num_dims
    return tuple(axis if each == dim % num_dims else None for each in range(num_dims))
