"""Tolerances for rounding, from the narrowest floating-point dtype in a program.

Rounding affects some arrays more than others. The gradient of a bias before a batch norm is zero as the sum of nonzero
terms, so the result is rounding noise, and two correct programs have different noise. To measure it, one device trains
twice: from the parameters, and from copies that differ in the last digit (`moved`). An optimizer that uses the sign of
a gradient turns such noise into a full update, on which no two programs agree (`undecided`).
"""

from collections.abc import Iterator
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...mesh.compat import is_literal, line_of
from ..xla.graph import inner_programs

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""The relative error that rounding explains, for the narrowest dtype of a program."""
MEASURED_TIMES = 16
"""The ratio of the effect of rounding on two meshes to that of one rounding of the parameters."""
MAX_WIDER = {1e-9: 1e3, 1e-5: 1e2}
"""Tolerance -> the largest factor by which a measurement can widen it; 16-bit tolerances are wide enough."""


class Narrowing(NamedTuple):
    """The narrowest floating-point numbers of a program.

    Attributes:
        dtype: Their dtype.
        array: The array that is cast to fewer bits, such as "float64[8,16]"; "" if there is none.
        place: The line that casts it.
    """

    dtype: str
    array: str = ""
    place: str = ""

    @property
    def tolerance(self) -> float:
        """The relative error that rounding explains."""
        return TOLERANCES.get(self.dtype, 0.0)


def narrowing(jaxpr: Any, stored: str, *, scalars: bool = True) -> Narrowing:
    """Finds the narrowest numbers that a program computes with.

    A cast of a constant, such as a dropout rate, gives the same number on every mesh and does not count.

    Args:
        jaxpr: The program.
        stored: The dtype of its parameters.
        scalars: Whether scalars that depend on the program's inputs count; a float32 learning rate is the same on every
            mesh.
    """
    casts = _narrowed(jaxpr, scalars, set(jaxpr.invars))
    return min([Narrowing(stored), *casts], key=lambda each: width(each.dtype))


def width(dtype: str) -> int:
    """Returns the bits of a floating-point dtype; 0 for ""."""
    return jnp.finfo(dtype).bits if dtype else 0


def _narrowed(jaxpr: Any, scalars: bool, inputs: set[Any]) -> Iterator[Narrowing]:
    """Yields the casts to fewer bits of values that depend on some inputs; adds those values to `inputs`."""
    for equation in jaxpr.eqns:
        reads = [not is_literal(each) and each in inputs for each in equation.invars]
        inputs.update(equation.outvars if any(reads) else ())
        for inner in inner_programs(equation):
            is_call = len(inner.invars) == len(reads) and equation.primitive.name not in ("scan", "while")
            read = reads if is_call else [any(reads)] * len(inner.invars)
            yield from _narrowed(inner, scalars, set(compress(inner.invars, read)))
        if equation.primitive.name != "convert_element_type" or not any(reads):
            continue
        given, made = equation.invars[0].aval, equation.outvars[0].aval
        floating = all(jnp.issubdtype(each.dtype, jnp.floating) for each in (given, made))
        if floating and made.dtype.itemsize < given.dtype.itemsize and (scalars or made.shape):
            array = f"{given.dtype}[{','.join(map(str, given.shape))}]"
            yield Narrowing(str(made.dtype), array, line_of(equation))


def moved(params: Any, bound: float) -> Any:
    """Returns parameters with each element changed by one unit in the last place, in the dtype of a tolerance.

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


def error_scale(size: float, found: np.ndarray, other: np.ndarray, bound: float) -> float:
    """Returns the scale of an error: the size of an array, or more if rounding affects it more than its size suggests.

    Args:
        size: The largest element that counts.
        found: The array of one device.
        other: The array after training from `moved` parameters.
        bound: The tolerance of the comparison.
    """
    if bound not in MAX_WIDER:
        return size
    apart = float(_distances(found, other).max(initial=0.0))
    if not np.isfinite(apart):
        return size
    return min(max(size, MEASURED_TIMES * apart / bound), MAX_WIDER[bound] * size)


def undecided(gradient: Any, moved_gradient: Any, after: Any, moved_after: Any, limit: float) -> np.ndarray:
    """Returns a mask of the elements of a parameter with updates that rounding decides.

    Args:
        gradient: Its gradient of the first batch.
        moved_gradient: The gradient from `moved` parameters.
        after: The parameter after all steps.
        moved_after: The parameter after all steps from `moved` parameters.
        limit: The largest difference that `error_scale` can explain.

    Returns:
        A mask: the elements with a gradient within the effect of rounding on this array, if the parameter moves by more
        than the limit in one of them; otherwise all False.
    """
    noise = np.abs(gradient) <= MEASURED_TIMES * _distances(gradient, moved_gradient).max(initial=0.0)
    return noise & bool((noise & (_distances(after, moved_after) > limit)).any())


def _distances(array: Any, other: Any) -> np.ndarray:
    return np.abs(np.asarray(array, np.float64) - np.asarray(other, np.float64))
