"""Checks of options dataclasses against the types of their fields, and the dtypes of a step."""

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Le, Lt
from jax import Array
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from ..mesh.errors import UserError, did_you_mean, raise_problems
from ..mesh.files import LOCAL, is_url

REST = -1
"""The size of an axis that takes all remaining devices."""
MIN_FLOAT32, MAX_FLOAT32 = float(np.finfo(np.float32).smallest_normal), float(np.finfo(np.float32).max)
PositiveFloat32: TypeAlias = Annotated[
    float, Ge(MIN_FLOAT32), Le(MAX_FLOAT32), WithJsonSchema({"type": "number", "exclusiveMinimum": 0})
]
"""A positive number that is neither 0 nor infinite in float32."""


def _reject_url(path: str) -> str:
    if is_url(path):
        raise PydanticCustomError("url", "the path is a URL")
    return path


LocalPath: TypeAlias = Annotated[str, AfterValidator(_reject_url)]
"""A path on a mounted file system: the type of every option that is a path."""
RULES = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping (key: value)",
    "mapping_type": "a mapping (key: value)",
    "dataclass_type": "a mapping (key: value)",
    "dataclass_exact_type": "a {class_name}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "greater than {gt}",
    "less_than": "less than {lt}",
    "too_long": "a list of {max_length} values",
    "url": LOCAL,
}
"""Type of a pydantic error -> the end of `must be ...`."""


def check_options(strategy: str, options: Any, problems: Iterable[str] = ()) -> None:
    """Checks a strategy's options in `__post_init__`, see `type_problems`.

    Args:
        strategy: The name of the strategy and its mesh axis.
        options: The options dataclass; the annotations of the fields are the types.
        problems: Further problems, used only if all types are right.

    Raises:
        UserError: Options have the wrong type, an unknown choice, a number that is not finite, or an invalid size; each
            message begins with `strategy.<strategy>.<option>`.
    """
    found = type_problems(f"strategy.{strategy}", options)
    if not found and options.size < 1 and options.size != REST:
        found.append(f"strategy.{strategy}={options.size} must be at least 1, or {REST} for the remaining devices.")
    raise_problems(found or problems)


def type_problems(section: str, options: Any, kind: Any = None) -> list[str]:
    """Converts the fields of a dataclass as `validated` does, and returns the error messages.

    Args:
        section: The beginning of the keys in messages.
        options: The dataclass.
        kind: A base class to convert only its fields; None for all fields.
    """
    problems = []
    for field in fields(kind or options):
        value, key = getattr(options, field.name), f"{section}.{field.name}"
        if isinstance(field.type, type) and is_dataclass(field.type):  # which has checked its own fields
            if not isinstance(value, field.type):
                problems.append(f"{key}={reprlib.repr(value)} must be a {field.type.__name__}.")
            continue
        try:
            object.__setattr__(options, field.name, validated(field.type, value, key))
        except UserError as error:
            problems += str(error).splitlines()
    return problems


def validated(kind: Any, value: Any, key: str) -> Any:
    """Checks a value, and returns it with NumPy numbers and arrays converted to Python's, and lists to tuples.

    Args:
        kind: The required type, with the range: `Annotated[int, Ge(1)]`.
        value: The value.
        key: The key of the value, for messages.

    Raises:
        UserError: The value does not have the type or is out of range.
    """
    try:
        return _type_adapter(kind).validate_python(_plain(value))
    except ValidationError as error:
        rules: dict[str, dict[str, None]] = {}  # the types of a union fail one by one
        for each in error.errors():
            place = "".join(f"[{part}]" for part in each["loc"] if isinstance(part, int))
            rules.setdefault(f"{key}{place}={reprlib.repr(each['input'])}", {})[rule_of(each)] = None
        raise UserError("\n".join(f"{given} must be {' or '.join(found)}." for given, found in rules.items())) from None


def rule_of(error: ErrorDetails) -> str:
    """Returns the rule that a value violates: `at least 1`."""
    context = error.get("ctx", {})
    if error["type"] == "literal_error":
        choices = [each for each in re.findall(r"'([^']*)'", context["expected"]) if each]
        near = did_you_mean(error["input"], choices) if isinstance(error["input"], str) else ""
        return f"one of {', '.join(choices)}{f' ({near.strip()})' if near else ''}"
    if context.get("ge") == MIN_FLOAT32:
        return "positive in float32"
    values = {name: show_number(value) for name, value in context.items()}
    return RULES.get(error["type"], error["msg"]).format(**values)


def show_number(value: Any) -> str:
    """Formats a number; a float without a fraction looks like an integer."""
    if not isinstance(value, float):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.6g}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


@cache
def _type_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


Dtype: TypeAlias = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes by name; the defaults are plain float32.

    The usual mixed precision is `compute: bfloat16` alone: master weights and the sums of gradients over devices and
    microbatches stay float32.
    """

    params: Dtype = "float32"
    """Dtype of the stored parameters and of the optimizer's moments."""
    compute: Dtype = "float32"
    """Dtype that parameters are cast to before the model sees them (before they are gathered, under FSDP), and with
    the floating-point arrays of a batch except "weights" and "targets". float16 cannot represent numbers below 6e-8, so
    the loss is scaled (loss_scale); bfloat16 has the range of float32, and does not need it."""
    reduce: Dtype = "float32"
    """Dtype in which gradients are summed over devices. They are sums over rows, which are divided only afterwards, and
    float16 cannot represent numbers above 65504, so the loss is scaled (loss_scale)."""
    loss_scale: Literal["auto", "dynamic", "none"] | PositiveFloat32 = "auto"
    """The factor of the loss before backward; gradients are divided by it afterwards. A number, dynamic, none or auto.
    With dynamic, the scale is halved and the update skipped if a gradient is not finite, and the scale is doubled after
    loss_scale_interval updates. auto = dynamic if compute or reduce is float16 and params is not, otherwise none."""
    loss_scale_initial: PositiveFloat32 = 32768.0
    """The initial scale, with dynamic."""
    loss_scale_interval: Annotated[int, Ge(1), Lt(2**31)] = 2000
    """Consecutive updates after which the scale doubles, with dynamic."""

    def __post_init__(self) -> None:
        problems = type_problems("precision", self)
        if not problems and self.params == "float16" and self.scaling != "none":
            problems.append(
                f"precision.loss_scale={self.loss_scale} with precision.params=float16: gradients are stored in the "
                "dtype of the parameters, which would lose them after the division by the scale. Set "
                "precision.params=float32, or precision.loss_scale=none."
            )
        raise_problems(problems)

    @property
    def scaling(self) -> Literal["dynamic", "none"] | float:
        """The value of `loss_scale` with auto resolved."""
        if self.loss_scale != "auto":
            return self.loss_scale
        return "dynamic" if "float16" in (self.compute, self.reduce) and self.params != "float16" else "none"

    @property
    def needs_x64(self) -> bool:
        """True if JAX's 64-bit types must be enabled."""
        return "float64" in (self.params, self.compute, self.reduce)


FLOAT32 = Precision()
"""All dtypes float32."""


NOT_NARROWED = ("weights", "targets")
"""Arrays of a batch that are never cast to fewer bits: sums of weights are counts, which bfloat16 represents exactly
only up to 256, and targets are compared with float32 or wider outputs."""


def cast_inputs(batch: Mapping[str, Array], dtype: str) -> dict[str, Array]:
    """Casts the floating-point arrays of a batch as parameters are cast; those in `NOT_NARROWED` only to more bits."""

    def wanted(name: str, array: Array) -> Any:
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return jnp.promote_types(array.dtype, dtype) if is_float and name in NOT_NARROWED else dtype

    return {name: cast_float(array, wanted(name, array)) for name, array in batch.items()}


def cast_floats(tree: Any, dtype: str) -> Any:
    """Casts the floating-point leaves of a tree; integers, booleans and keys do not change."""
    return jax.tree.map(lambda leaf: cast_float(leaf, dtype), tree)


def cast_float(leaf: Array, dtype: Any) -> Array:
    """Casts one array if its dtype is floating-point."""
    return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def scaled(value: Array, scale: Array | None) -> Array:
    """Multiplies a sum of the loss, or the divisor of its gradients, by the loss scale; None means 1."""
    return value if scale is None else value * scale
