"""What rounding alone explains: the narrowest floating-point numbers anywhere in a program decide it.

Of some arrays rounding moves more. The gradient of a bias before a batch norm is zero, a sum of terms that are not:
what is left of them is rounding alone, and two right programs have other digits of it. So it is measured: one device
trains twice, from the parameters and from the same, each moved by the last place of its digits (`moved`).
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..xla.equations import equations

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""The relative error that rounding alone explains, where the narrowest numbers of a program have this dtype."""
MEASURED_TIMES = 16
"""Times what one rounding of the parameters moves, rounding on two meshes explains."""
MOST_WIDER = {1e-9: 1e3, 1e-5: 1e2}
"""Tolerance -> how many times it what is measured can explain at most; in 16 bits it is wide enough."""


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


def moved(params: Any, bound: float) -> Any:
    """Parameters, each element a last place larger or smaller, in the digits that a tolerance stands for.

    Args:
        params: Host arrays.
        bound: One of `TOLERANCES`.
    """
    dtype = next(name for name, each in TOLERANCES.items() if each >= bound)
    random, place = np.random.default_rng(0), float(jnp.finfo(dtype).eps)

    def move(leaf: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return (leaf * (1 + place * random.choice([-1.0, 1.0], leaf.shape))).astype(leaf.dtype)

    return jax.tree.map(move, params)


def measured_by(size: float, found: np.ndarray, other: np.ndarray, bound: float) -> float:
    """What the error of an array is a part of: its size, or more where rounding moves it more than its size tells.

    Args:
        size: The largest element that counts.
        found: What one device has.
        other: The same after training from `moved` parameters.
        bound: The tolerance of the comparison.
    """
    if bound not in MOST_WIDER:
        return size
    apart = float(np.abs(np.asarray(other, np.float64) - np.asarray(found, np.float64)).max(initial=0.0))
    if not np.isfinite(apart):
        return size
    return min(max(size, MEASURED_TIMES * apart / bound), MOST_WIDER[bound] * size)
