"""The names of JAX's primitives, as far as the runtime looks at traced functions. Those of JAX 0.10.2 and 0.12.0.

A name that JAX changes falls out of its set without an error: what depends on it then keeps or computes more than it
needs, and the tests of `blocks/remat.py` and `blocks/split_backward.py` say so.
"""

from collections.abc import Mapping
from typing import Any

CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"))
"""They run another function as it is."""

MOVES = frozenset(
    (
        *("reshape", "transpose", "squeeze", "expand_dims", "slice", "split", "rev", "copy", "copy_p"),
        *("broadcast_in_dim", "convert_element_type", "reduce_precision", "pvary", "pcast", "stop_gradient", "name"),
    )
)
"""They move, cast or name what they are given, one array: cheap to do again."""

JOINS = frozenset(("concatenate", "dynamic_slice"))
"""They move too, but of several arrays, or from a place that is computed."""

GATHERS = frozenset(("all_gather", "all_gather_invariant"))
"""They collect what devices hold."""

SUMS = frozenset(("psum", "psum2", "psum_invariant"))
"""They sum what devices hold."""

REDUCTIONS = SUMS | {"pmax", "pmin"}
"""They reduce what devices hold to one value on all of them."""

COLLECTIVES = (
    frozenset(("reduce_scatter", "psum_scatter", "ppermute", "all_to_all", "ragged_all_to_all")) | REDUCTIONS | GATHERS
)
"""They move numbers between devices."""

PRODUCTS = frozenset(
    ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "scan", "while", "cond")
)
"""Products of matrices, and what may hold some."""

PLATFORM_CHOICE = "platform_index"
"""What a choice by platform starts with, see `platform.py`."""


def gathered_over(params: Mapping[str, Any]) -> frozenset[str]:
    """The mesh axes that one of `GATHERS` collects over, from the parameters of its operation."""
    axes = params["axis_name"]
    return frozenset(axes if isinstance(axes, tuple) else (axes,))
