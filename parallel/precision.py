"""The dtypes of a step: what parameters are stored in, computed in, and what their gradients are summed in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
    them the floating-point arrays of a batch but for "weights" and "targets". float16 holds no number under 6e-8, so
    that the loss is scaled (loss_scale); bfloat16 has the range of float32, and needs none."""
    reduce: str = "float32"
    """Dtype in which gradients are summed over devices. They are sums over the rows until then, divided only after:
    float16 holds none over 65504, so that the loss is scaled (loss_scale)."""
    loss_scale: Literal["auto", "dynamic", "none"] | float = "auto"
    """What the loss is multiplied by before backward, and its gradients are divided by after it: a number; dynamic, one
    that halves where a gradient is not finite, whose update is left out, and that doubles after loss_scale_interval
    updates; none; auto = dynamic if compute or reduce is float16 and params are not, else none."""
    loss_scale_initial: float = 32768.0
    """The first scale, under dynamic."""
    loss_scale_interval: int = 2000
    """Updates in a row after which the scale doubles, under dynamic."""

    def __post_init__(self) -> None:
        problems = [
            f"precision.{role}={getattr(self, role)!r} is not one of {', '.join(DTYPES)}."
            for role in ("params", "compute", "reduce")
            if getattr(self, role) not in DTYPES
        ]
        problems = problems or _scaling_problems(self)
        if problems:
            raise UserError("\n".join(problems))

    @property
    def scaling(self) -> Literal["dynamic", "none"] | float:
        """What `loss_scale` comes down to."""
        if self.loss_scale != "auto":
            return self.loss_scale
        return "dynamic" if "float16" in (self.compute, self.reduce) and self.params != "float16" else "none"

    @property
    def needs_x64(self) -> bool:
        """Whether JAX's 64-bit types have to be switched on."""
        return "float64" in (self.params, self.compute, self.reduce)


def _scaling_problems(precision: Precision) -> list[str]:
    """Scales that are out of range, that nothing reads, or whose gradients would be lost again."""
    problems = []
    scales = {"loss_scale_initial": precision.loss_scale_initial}
    if not isinstance(precision.loss_scale, str):
        scales["loss_scale"] = precision.loss_scale
    for name, scale in scales.items():
        if not 0 < scale < float("inf"):
            problems.append(f"precision.{name}={scale} has to be over 0, and finite; a power of two is exact.")
    if precision.loss_scale_interval < 1:
        problems.append(f"precision.loss_scale_interval={precision.loss_scale_interval}: at least 1 update.")
    if precision.scaling == "none":
        return problems
    if precision.params == "float16":
        problems.append(
            f"precision.loss_scale={precision.loss_scale} with precision.params=float16: gradients are stored in the "
            "dtype of the parameters, so that what is divided by the scale would be lost there. Set "
            "precision.params=float32, or precision.loss_scale=none."
        )
    return problems


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


def scaled(value: Array, scale: Array | None) -> Array:
    """A sum of the loss, or a divisor of its gradients, times the scale of the loss; None is 1."""
    return value if scale is None else value * scale
