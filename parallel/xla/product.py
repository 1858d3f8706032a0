"""Products of activations and matrices: how their gradients are computed, and when.

Autodiff makes the gradient of the matrix as a product and its transpose, which XLA folds into one product that
contracts the first dim of one side and the last of the other. XLA's CPU backend has no fast kernel for that: it takes
two to three times as long, a tenth of a whole step. Written in the order of the matrix there is nothing to fold. (Where
XLA partitions by itself, an all-reduce stands between the two, and hides the same from it.)

XLA may also put off the gradient of a matrix that nothing waits for, to the end of the step, and keep until then what
it is made of: for the head, logits through the whole backward loop. `weight_first` has it computed at once.
"""

import jax
from jax import Array, lax

from ...mesh.compat import varying_axes
from .in_order import after


def product(x_BLD: Array, weight_DF: Array) -> Array:
    """Multiplies activations (B, L, D) with a matrix (D, F), both per-device, to (B, L, F)."""
    axes = varying_axes(x_BLD) | varying_axes(weight_DF)
    return _product(_vary(x_BLD, axes), _vary(weight_DF, axes))


def _vary(value: Array, axes: frozenset[str]) -> Array:
    """A gradient that is written out has to vary as its argument does; this cast's own gradient sums it again."""
    missing = tuple(sorted(axes - varying_axes(value)))
    return lax.pcast(value, missing, to="varying") if missing else value


@jax.custom_vjp
def _product(x_BLD: Array, weight_DF: Array) -> Array:
    return x_BLD @ weight_DF


def _forward(x_BLD: Array, weight_DF: Array) -> tuple[Array, tuple[Array, Array]]:
    return x_BLD @ weight_DF, (x_BLD, weight_DF)


def _backward(kept: tuple[Array, Array], gradient_BLF: Array) -> tuple[Array, Array]:
    x_BLD, weight_DF = kept
    x_gradient_BLD = lax.dot_general(gradient_BLF, weight_DF, (((2,), (1,)), ((), ())))
    rows = ((0, 1), (0, 1)), ((), ())
    if x_BLD.shape[-1] <= gradient_BLF.shape[-1]:
        return x_gradient_BLD, lax.dot_general(x_BLD, gradient_BLF, rows)
    return x_gradient_BLD, lax.optimization_barrier(lax.dot_general(gradient_BLF, x_BLD, rows)).T


_product.defvjp(_forward, _backward)


def weight_first(x: Array, weight: Array) -> tuple[Array, Array]:
    """Both factors of a product, unchanged; in backward, `x` has its gradient only once `weight` has its own."""
    axes = varying_axes(x) | varying_axes(weight)
    return _weight_first(_vary(x, axes), _vary(weight, axes))


@jax.custom_vjp
def _weight_first(x: Array, weight: Array) -> tuple[Array, Array]:
    return x, weight


def _weight_first_backward(_: None, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
    dx, dweight = lax.optimization_barrier(gradients)
    return after(dweight, dx), dweight


_weight_first.defvjp(lambda x, weight: ((x, weight), None), _weight_first_backward)
