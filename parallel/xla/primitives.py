"""The names of the JAX primitives that the runtime looks for in traced functions, in JAX 0.10.2 and 0.12.0.

If JAX renames a primitive, it no longer matches, without an error. The code that uses the set then keeps or computes
more than necessary, and the tests of `blocks/gathered_block.py` and `blocks/split_backward.py` fail.
"""

from collections.abc import Mapping
from typing import Any

CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"))
"""Primitives that call another function."""

MOVES = frozenset(("reshape", "transpose", "squeeze", "expand_dims", "slice", "split", "rev", "copy", "copy_p"))
MOVES |= {"broadcast_in_dim", "convert_element_type", "reduce_precision", "pvary", "pcast", "stop_gradient", "name"}
"""Primitives that move, cast or name one array, and are cheap to repeat."""

JOINS = frozenset(("concatenate", "dynamic_slice"))
"""Primitives that move several arrays, or parts of arrays at a computed position."""

GATHERS = frozenset(("all_gather", "all_gather_invariant"))
"""Primitives that gather from devices."""

SCATTERS = frozenset(("reduce_scatter", "psum_scatter"))
"""Primitives that sum over devices and scatter the result."""

SUMS = frozenset(("psum", "psum2", "psum_invariant"))
"""Primitives that sum over devices."""

REDUCTIONS = SUMS | {"pmax", "pmin"}
"""Primitives that reduce over devices, with the result on all of them."""

EXCHANGES = {"ppermute": "collective-permute", "all_to_all": "all-to-all", "ragged_all_to_all": "ragged-all-to-all"}
"""Primitives that exchange parts between devices, and the kinds of their collectives in HLO."""

COLLECTIVES = frozenset(EXCHANGES) | REDUCTIONS | SCATTERS | GATHERS
"""Primitives that move data between devices."""

PRODUCTS = frozenset(
    ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "scan", "while", "cond")
)
"""Matrix products, and primitives that may contain some."""

FUSED_ATTENTION = "dot_product_attention_fwd_wrapper"
"""The primitive of cuDNN's attention: its output and, for backward, the statistics of the softmax."""

PLATFORM_CHOICE = "platform_index"
"""The first primitive of a selection by platform, see `platform.py`."""


def gathered_over(params: Mapping[str, Any]) -> frozenset[str]:
    """Returns the mesh axes of one of `GATHERS` or `SCATTERS`, from the parameters of its operation."""
    axes = params["axis_name"]
    return frozenset(axes if isinstance(axes, tuple) else (axes,))
