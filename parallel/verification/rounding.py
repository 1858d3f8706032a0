"""What rounding alone explains: the narrowest floating-point numbers anywhere in a program decide it."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from ..xla.equations import equations

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""The relative error that rounding alone explains, where the narrowest numbers of a program have this dtype."""


def tolerance(jaxpr: Any, stored: str, *, scalars: bool = True) -> float:
    """The relative error that rounding explains in what a program computes.

    Args:
        jaxpr: The program.
        stored: The dtype of its parameters.
        scalars: Whether numbers count as well that are no array: a learning rate in float32 is the same everywhere.
    """
    return TOLERANCES.get(min((stored, *_narrowed(jaxpr, scalars)), key=width), 0.0)


def width(dtype: str) -> int:
    """Bits of a floating-point dtype; 0 for ""."""
    return jnp.finfo(dtype).bits if dtype else 0


def _narrowed(jaxpr: Any, scalars: bool) -> Iterator[str]:
    """The dtypes that floating-point numbers are cast down to, anywhere in a program; `scalars` too, if asked for."""
    for equation in equations(jaxpr):
        if equation.primitive.name != "convert_element_type":
            continue
        given, made = (variables[0].aval.dtype for variables in (equation.invars, equation.outvars))
        floating = all(jnp.issubdtype(each, jnp.floating) for each in (given, made))
        if floating and made.itemsize < given.itemsize and (scalars or equation.outvars[0].aval.shape):
            yield str(made)
