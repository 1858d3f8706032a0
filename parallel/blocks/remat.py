"""What a block keeps between forward and backward, by name.

`none` keeps every result of arithmetic, `dots` the products of matrices, `full` only the block's input. Under FSDP
none of them keeps a gathered parameter: backward gathers it again.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; the policies are `jax.checkpoint`'s.
"""

from collections.abc import Callable
from typing import Any

import jax

from ...mesh.errors import UserError
from ..xla.in_order import recomputed_late
from ..xla.primitives import GATHERS, JOINS, MOVES, PLATFORM_CHOICE, gathered_over

REMAT_POLICIES = ("none", "dots", "full")

_ACTIVATION_AXES = ("tensor", "context")


def save_arithmetic(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: keep results of arithmetic, make again what was only gathered, moved or cast."""
    return not _only_moves(primitive.name, params)


def _only_moves(name: str, params: Any) -> bool:
    """Whether an operation only moves values; a call (a custom gradient) does if nothing in it computes.

    Moving or casting a value costs little, and keeping it would keep a gathered parameter alive under another shape.
    """
    called = params.get("call_jaxpr")
    if called is not None:
        names = [equation.primitive.name for equation in called.eqns]
        choosing = PLATFORM_CHOICE in names  # a value that waits, see in_order.py
        return choosing or all(_only_moves(equation.primitive.name, equation.params) for equation in called.eqns)
    if name in GATHERS:  # what is gathered over these axes is no parameter: as dear as arithmetic
        return gathered_over(params).isdisjoint(_ACTIVATION_AXES)
    return name in MOVES | JOINS


def remat_block(block: Callable[..., Any], remat: str, *, makes_copies: bool, in_loop: bool) -> Callable[..., Any]:
    """Wraps a block so that backward recomputes what the policy does not keep.

    Args:
        block: The function of one block, its gathers inside.
        remat: One of `REMAT_POLICIES`.
        makes_copies: Whether the block gathers or casts its parameters, so that backward would keep the copies of all
            blocks; if not, `none` leaves it as it is.
        in_loop: Whether forward and backward are separate loops of more than one turn, so that XLA cannot merge the
            two computations; otherwise what is computed again waits for the gradient.

    Raises:
        UserError: The policy's name is unknown.
    """
    if remat not in REMAT_POLICIES:
        raise UserError(f"train.remat={remat!r} is not a policy. Choose one of {', '.join(REMAT_POLICIES)}.")
    if remat == "none" and not makes_copies:
        return block
    policies = {
        "none": save_arithmetic,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    again = jax.checkpoint(block, policy=policies[remat], prevent_cse=not in_loop)
    return again if in_loop else recomputed_late(again, inputs_alone=remat == "none")
