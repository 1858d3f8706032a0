"""The dtypes of a step: what parameters are stored in, computed in, and what their gradients are summed in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..mesh.errors import UserError

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes by name; the defaults are plain float32.

    The usual mixed precision is `compute: bfloat16` alone: master weights and the sums of gradients over devices and
    microbatches stay float32.
    """

    params: str = "float32"
    """Dtype of the stored parameters and of the optimizer's moments."""
    compute: str = "float32"
    """Dtype that parameters are cast to before the model sees them (before they are gathered, under FSDP), and with
    them the floating-point arrays of a batch but for "weights" and "targets". float16 holds no number under 6e-8, and
    the loss is not scaled: gradients smaller than that are lost. bfloat16 has the range of float32."""
    reduce: str = "float32"
    """Dtype in which gradients are summed over devices."""

    def __post_init__(self) -> None:
        problems = [
            f"precision.{role}={getattr(self, role)!r} is not one of {', '.join(DTYPES)}."
            for role in ("params", "compute", "reduce")
            if getattr(self, role) not in DTYPES
        ]
        if problems:
            raise UserError("\n".join(problems))

    @property
    def needs_x64(self) -> bool:
        """Whether JAX's 64-bit types have to be switched on."""
        return "float64" in (self.params, self.compute, self.reduce)


FLOAT32 = Precision()
"""Everything in float32."""


NOT_NARROWED = ("weights", "targets")
"""Arrays of a batch that never lose bits: sums of weights are counts, which 16 bits cannot count beyond 256, and
targets are compared with what the model makes in float32 or wider."""


def cast_inputs(batch: Mapping[str, Array], dtype: str) -> dict[str, Array]:
    """Casts the floating-point arrays of a batch as parameters are cast; those of `NOT_NARROWED` only to wider ones."""

    def wanted(name: str, array: Array) -> Any:
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return jnp.promote_types(array.dtype, dtype) if is_float and name in NOT_NARROWED else dtype

    return {name: cast_float(array, wanted(name, array)) for name, array in batch.items()}


def cast_floats(tree: Any, dtype: str) -> Any:
    """Casts the floating-point leaves of a tree; integers, booleans and keys stay as they are."""
    return jax.tree.map(lambda leaf: cast_float(leaf, dtype), tree)


def cast_float(leaf: Array, dtype: Any) -> Array:
    """Casts one array if it is of a floating-point dtype."""
    return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
