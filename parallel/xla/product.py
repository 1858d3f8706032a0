"""Products of activations and matrices: how their gradients are computed, and when.

Autodiff makes the gradient of the matrix as a product and its transpose, which XLA folds into one product that
contracts the first dim of one side and the last of the other. XLA's CPU backend has no fast kernel for that: it takes
two to three times as long, a tenth of a whole step. Written in the order of the matrix there is nothing to fold. (Where
XLA partitions by itself, an all-reduce stands between the two, and hides the same from it.)

XLA may also put off the gradient of a matrix that nothing waits for, to the end of the step, and keep until then what
it is made of: for the head, logits through the whole backward loop. `weight_first` has it computed at once, which took
3.9 and 4.3 % off the memory of a step (`benchmarks/RESULTS.md`).
"""

import jax
from jax import Array, lax

from ...mesh.compat import varying_axes
from ..collectives import vary
from .in_order import after
from .platform import by_platform


def product(x_BLD: Array, weight_DF: Array) -> Array:
    """Multiplies activations (B, L, D) with a matrix (D, F), both per-device, to (B, L, F)."""
    return _product(*_alike(x_BLD, weight_DF))


def _alike(x: Array, weight: Array) -> tuple[Array, Array]:
    """Both, varying alike: a gradient that is written out has to vary as its argument does.

    The gradient of this cast is the sum over the axes that it adds.
    """
    axes = sorted(varying_axes(x) | varying_axes(weight))
    return vary(x, axes), vary(weight, axes)


@jax.custom_vjp
def _product(x_BLD: Array, weight_DF: Array) -> Array:
    return x_BLD @ weight_DF


def _forward(x_BLD: Array, weight_DF: Array) -> tuple[Array, tuple[Array, Array]]:
    return x_BLD @ weight_DF, (x_BLD, weight_DF)


def _backward(residuals: tuple[Array, Array], gradient_BLF: Array) -> tuple[Array, Array]:
    x_BLD, weight_DF = residuals
    x_gradient_BLD = lax.dot_general(gradient_BLF, weight_DF, (((2,), (1,)), ((), ())))
    if x_BLD.shape[-1] <= gradient_BLF.shape[-1]:
        return x_gradient_BLD, _weight_gradient(x_BLD, gradient_BLF)
    return x_gradient_BLD, by_platform("product", _narrower_first, _weight_gradient, x_BLD, gradient_BLF)


def _weight_gradient(x_BLD: Array, gradient_BLF: Array) -> Array:
    return lax.dot_general(x_BLD, gradient_BLF, (((0, 1), (0, 1)), ((), ())))


def _narrower_first(x_BLD: Array, gradient_BLF: Array) -> Array:
    """The same, transposed once it is made: it takes less room to transpose the narrower factor."""
    return lax.optimization_barrier(_weight_gradient(gradient_BLF, x_BLD)).T


_product.defvjp(_forward, _backward)


def weight_first(x: Array, weight: Array) -> tuple[Array, Array]:
    """Both factors of a product, unchanged; in backward, `x` has its gradient only once `weight` has its own."""
    return _weight_first(*_alike(x, weight))


@jax.custom_vjp
def _weight_first(x: Array, weight: Array) -> tuple[Array, Array]:
    return x, weight


def _weight_first_backward(_: None, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
    return by_platform("weight_first", _weight_gradient_first, lambda dx, dweight: (dx, dweight), *gradients)


def _weight_gradient_first(dx: Array, dweight: Array) -> tuple[Array, Array]:
    dx, dweight = lax.optimization_barrier((dx, dweight))
    return after(dweight, dx), dweight


_weight_first.defvjp(lambda x, weight: ((x, weight), None), _weight_first_backward)
