"""Hugging Face's `tp_plan`: module names with `*` for numbers, and the word for how each module is split.

    word                                                   a matrix, as torch has it (out, in)     its bias
    colwise, colwise_rep, colwise_gather_output            out is split                            split
    rowwise, rowwise_rep, rowwise_split_input              in is split                             whole
    local_colwise, local_rowwise                           as without "local_"
    embedding_rowwise, vocab_parallel_rowwise              the vocabulary is split (dim 0)
    embedding_colwise                                      the width is split (dim 1)
    grouped_gemm                                           experts are split (dim 0)
    replicate, sequence_parallel, and those that only      whole                                   whole
    hook into a module: gather, all_reduce, ...

What differs between the words of one line is where activations are gathered. Here XLA decides that, from the layouts of
the parameters (`strategy.tensor.explicit: false`, or `ModelParallel`); the numbers are the same.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from ...mesh.device_mesh import DeviceMesh
from ...mesh.errors import UserError
from ...mesh.near_miss import did_you_mean
from .. import problems
from ..layout_map import LayoutMap
from ..paths import leaves_with_paths
from .exact import Entries, check_unused, exact_map

COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output", "local_colwise")
ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise")
FIRST = ("embedding_rowwise", "vocab_parallel_rowwise", "grouped_gemm")
LAST = ("embedding_colwise",)
HOOKS = ("gather", "all_reduce", "mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert", "ep_router")
HOOKS += ("ep_dispatch_experts", "local", "local_params")
WHOLE = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel", *HOOKS)
KNOWN = (*COLUMNS, *ROWS, *FIRST, *LAST, *WHOLE)
IN_OUT = ("kernel", "w")
"""Names of matrices that are stored (in, out), as JAX libraries do; all others are (out, in)."""


def from_tp_plan(
    plan: Mapping[str, str],
    params: Any,
    mesh: DeviceMesh,
    *,
    axis: str = "tensor",
    prefix: str = "model",
    unused: Literal["error", "ignore"] = "error",
) -> LayoutMap:
    """Lays parameters out as a plan of `transformers` splits them.

    Args:
        plan: Name of a module, or of a parameter, with `*` for each number -> word, such as
            `{"layers.*.self_attn.q_proj": "colwise"}`; from `config.base_model_tp_plan` or a model's `_tp_plan`.
        params: The parameters, or their shapes, under the names of `transformers`, joined by "/" or ".". A matrix
            called `kernel` or `w` is (in, out); any other is (out, in), as torch has it. Leading dims may count blocks.
        mesh: The mesh of the map.
        axis: The mesh axis that splits.
        prefix: Names may begin with it or not: plans of a base model leave it out.
        unused: What happens to a name that no parameter has or lies below: "error" or "ignore", for plans that serve
            several models.

    Returns:
        One rule for each parameter that the plan names; the others are left to the strategy.

    Raises:
        UserError: A word is not known, or splits what is packed into one array, which no layout can; a name of the
            plan meets no parameter; the mesh has no such axis.
    """
    what = "from_tp_plan"
    check_unused(unused, what)
    wrong = [f"{what}: {problem}" for key, word in plan.items() if (problem := _word_problem(key, word))]
    leaves = leaves_with_paths(params)
    patterns = {key: _pattern(key, prefix) for key in plan}
    found: dict[str, Entries] = {}
    used: set[str] = set()
    for path, leaf in leaves:
        name = path.replace("/", ".")
        used |= {key for key, pattern in patterns.items() if any(map(pattern.fullmatch, _itself_and_above(name)))}
        key = _deciding(name, patterns)
        if key is not None:
            found[path] = _entries(plan[key], name.rsplit(".", 1)[-1], len(leaf.shape), axis)
    paths = [path for path, _ in leaves]
    wrong += [
        f"{what}: {key!r} of the plan names no parameter. {_nearest(key, paths)}Correct it, say what names begin with "
        f"(prefix={prefix!r}), or leave it out; unused='ignore' passes over such names."
        for key in plan
        if key not in used and unused == "error"
    ]
    if wrong:
        raise UserError("\n".join(wrong))
    return exact_map(found, mesh, None, what)


def _word_problem(key: str, word: object) -> str | None:
    if word in KNOWN:
        return None
    if isinstance(word, str) and "packed" in word:
        return (
            f"{key!r} is {word!r}: several matrices lie in one array, and each is to be split by itself, so that a "
            "device holds several runs of a dim. A layout gives a device one run. Store the matrices as parameters of "
            "their own, or leave this entry out."
        )
    return f"{key!r} is {word!r}, which is no word for a split.{did_you_mean(word, KNOWN, otherwise='Known are')}"


def _pattern(key: str, prefix: str) -> re.Pattern[str]:
    """`*` stands for a number; a name may begin with the prefix, or leave out the key's own."""
    words = [r"\d+" if word == "*" else re.escape(word) for word in key.split(".")]
    start = f"(?:{re.escape(prefix)}\\.)?" if prefix else ""
    if prefix and key.split(".")[0] == prefix:
        words = words[1:]
    return re.compile(start + r"\.".join(words))


def _itself_and_above(name: str) -> list[str]:
    """A parameter's name, and those of all modules that it is in."""
    words = name.split(".")
    return [".".join(words[:count]) for count in range(1, len(words) + 1)]


def _deciding(name: str, patterns: Mapping[str, re.Pattern[str]]) -> str | None:
    """The key that names a parameter itself, else the one that names its module."""
    for wanted in (name, name.rpartition(".")[0]):
        key = next((key for key, pattern in patterns.items() if pattern.fullmatch(wanted)), None)
        if key is not None:
            return key
    return None


def _entries(word: str, leaf: str, num_dims: int, axis: str) -> Entries:
    """The entries of one array of a module."""
    dim: int | None = None
    if word in FIRST:
        dim = 0
    elif word in LAST:
        dim = -1
    elif word in COLUMNS:
        dim = -1 if leaf in IN_OUT or leaf == "bias" or num_dims == 1 else -2
    elif word in ROWS and leaf != "bias":
        dim = -2 if leaf in IN_OUT and num_dims > 1 else -1
    if dim is None or not num_dims:
        return (None,) * num_dims
    return tuple(axis if each == dim % num_dims else None for each in range(num_dims))


def _nearest(key: str, paths: list[str]) -> str:
    near = problems.nearest_path(key.replace(".", "/"), paths)
    return "" if near is None else f"The nearest path is {near!r}. "
