"""The options of a step: checks against the types of their fields, from YAML and from Python, and the dtypes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin

import jax
import jax.numpy as jnp
from jax import Array

from ..mesh.errors import UserError, did_you_mean

REST = -1
"""The size of an axis that takes all remaining devices."""


def check_options(strategy: str, config: Any, problems: Iterable[str] = ()) -> None:
    """Checks a strategy's options in `__post_init__`; converts integers to int and lists of them to tuples.

    Args:
        strategy: The name of the strategy and its mesh axis.
        config: Its options dataclass; the annotations of the fields are the types.
        problems: Further problems, used only if all types are right.

    Raises:
        UserError: Options have the wrong type, an unknown choice, a number that is not finite, or an invalid size; each
            message begins with `strategy.<strategy>.<option>`.
    """
    found = []
    for field in fields(config):
        value = getattr(config, field.name)
        wanted = _type_rule(field.type, value)
        if wanted:
            found.append(f"strategy.{strategy}.{field.name}={_format(value)}{wanted}")
        elif field.type is int:
            object.__setattr__(config, field.name, int(value))
        elif get_origin(field.type) is tuple:
            object.__setattr__(config, field.name, tuple(map(int, value)))
    if not found and config.size < 1 and config.size != REST:
        found.append(f"strategy.{strategy}={config.size} must be at least 1, or {REST} for the remaining devices.")
    found = found or list(problems)
    if found:
        raise UserError("\n".join(found))


def _type_rule(hint: Any, value: Any) -> str:
    """Returns the rule that a value violates, as the end of a sentence, or ""."""
    if get_origin(hint) is Literal:
        return _choice(get_args(hint), value)
    if get_origin(hint) is tuple:
        fits = isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_integer, value))
        return "" if fits else " must be a list of integers."
    fits, words = {
        int: (_is_integer(value), "an integer"),
        float: (isinstance(value, Real) and not isinstance(value, bool) and isfinite(value), "a finite number"),
        bool: (isinstance(value, bool), "a boolean"),
        str: (isinstance(value, str), "a string"),
    }[hint]
    return "" if fits else f" must be {words}."


def _choice(choices: tuple[str, ...], value: Any) -> str:
    if isinstance(value, str) and value in choices:
        return ""
    return f": the choices are {', '.join(choices)}.{did_you_mean(value, choices, cutoff=0.3)}"


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _format(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    the floating-point arrays of a batch except "weights" and "targets". float16 cannot represent numbers below 6e-8, so
    the loss is scaled (loss_scale); bfloat16 has the range of float32, and does not need it."""
    reduce: str = "float32"
    """Dtype in which gradients are summed over devices. They are sums over rows, divided only afterwards:
    float16 cannot represent numbers above 65504, so the loss is scaled (loss_scale)."""
    loss_scale: Literal["auto", "dynamic", "none"] | float = "auto"
    """The factor of the loss before backward, by which gradients are divided afterwards: a number; dynamic: it is
    halved, and the update skipped, if a gradient is not finite, and doubled after loss_scale_interval updates; none;
    auto = dynamic if compute or reduce is float16 and params is not, otherwise none."""
    loss_scale_initial: float = 32768.0
    """The initial scale, under dynamic."""
    loss_scale_interval: int = 2000
    """Consecutive updates after which the scale doubles, under dynamic."""

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
        """The value of `loss_scale` with auto resolved."""
        if self.loss_scale != "auto":
            return self.loss_scale
        return "dynamic" if "float16" in (self.compute, self.reduce) and self.params != "float16" else "none"

    @property
    def needs_x64(self) -> bool:
        """Whether JAX's 64-bit types must be enabled."""
        return "float64" in (self.params, self.compute, self.reduce)


def _scaling_problems(precision: Precision) -> list[str]:
    """Returns errors for scales that are out of range, or that float16 parameters would lose."""
    problems = []
    scales = {"loss_scale_initial": precision.loss_scale_initial}
    if not isinstance(precision.loss_scale, str):
        scales["loss_scale"] = precision.loss_scale
    for name, scale in scales.items():
        if not 0 < scale < float("inf"):
            problems.append(f"precision.{name}={scale} must be positive and finite; a power of two is exact.")
    if not 1 <= precision.loss_scale_interval < 2**31:
        given = f"precision.loss_scale_interval={precision.loss_scale_interval}"
        problems.append(f"{given} must be at least 1 and below 2**31.")
    if precision.scaling == "none":
        return problems
    if precision.params == "float16":
        problems.append(
            f"precision.loss_scale={precision.loss_scale} with precision.params=float16: gradients are stored in the "
            "dtype of the parameters, which would lose them after the division by the scale. Set "
            "precision.params=float32, or precision.loss_scale=none."
        )
    return problems


FLOAT32 = Precision()
"""Everything in float32."""


NOT_NARROWED = ("weights", "targets")
"""Arrays of a batch that never lose bits: sums of weights are counts, which bfloat16 represents only up to 256, and
targets are compared with float32 or wider outputs."""


def cast_inputs(batch: Mapping[str, Array], dtype: str) -> dict[str, Array]:
    """Casts the floating-point arrays of a batch like parameters; those in `NOT_NARROWED` only to wider dtypes."""

    def wanted(name: str, array: Array) -> Any:
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return jnp.promote_types(array.dtype, dtype) if is_float and name in NOT_NARROWED else dtype

    return {name: cast_float(array, wanted(name, array)) for name, array in batch.items()}


def cast_floats(tree: Any, dtype: str) -> Any:
    """Casts the floating-point leaves of a tree; integers, booleans and keys do not change."""
    return jax.tree.map(lambda leaf: cast_float(leaf, dtype), tree)


def cast_float(leaf: Array, dtype: Any) -> Array:
    """Casts one array if it is of a floating-point dtype."""
    return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def scaled(value: Array, scale: Array | None) -> Array:
    """Multiplies a sum of the loss, or a divisor of its gradients, by the loss scale; None means 1."""
    return value if scale is None else value * scale
