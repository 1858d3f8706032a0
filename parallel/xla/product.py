"""Products of activations and matrices, with control over how and when their gradients are computed.

Autodiff computes the gradient of the matrix as a product followed by a transpose. XLA folds both into one product that
contracts the first dim of one side and the last of the other. XLA's CPU backend does not have a fast kernel for it: it
takes two to three times as long, a tenth of a whole step. A product that is written in the order of the matrix needs no
transpose, so nothing is folded. (If XLA partitions the product, an all-reduce between the two prevents the folding.)

XLA may also postpone the gradient of a matrix to the end of the step, and keep its operands until then; for the head,
these are the logits, through the whole backward loop. `weight_first` makes XLA compute the gradient immediately, which
reduced the memory of a step by 3.9 and 4.3 % (`benchmarks/RESULTS.md`).
"""

import jax
from jax import Array, lax

from ...mesh.compat import varying_axes
from ..collectives import vary
from .ordered_collectives import order_after
from .platform import by_platform


def product(x_BLD: Array, weight_DF: Array) -> Array:
    """Multiplies per-device activations (B, L, D) by a matrix (D, F), which gives (B, L, F)."""
    return _product(*_vary_alike(x_BLD, weight_DF))


def _vary_alike(x: Array, weight: Array) -> tuple[Array, Array]:
    """Returns both with the same varying axes: an explicit gradient must vary like its argument.

    The gradient of this cast is the sum over the added axes.
    """
    axes = sorted(varying_axes(x) | varying_axes(weight))
    return vary(x, axes), vary(weight, axes)


@jax.custom_vjp
def _product(x_BLD: Array, weight_DF: Array) -> Array:
    return x_BLD @ weight_DF


def _backward(residuals: tuple[Array, Array], gradient_BLF: Array) -> tuple[Array, Array]:
    x_BLD, weight_DF = residuals
    x_gradient_BLD = lax.dot_general(gradient_BLF, weight_DF, (((2,), (1,)), ((), ())))
    if x_BLD.shape[-1] <= gradient_BLF.shape[-1]:
        return x_gradient_BLD, _weight_gradient(x_BLD, gradient_BLF)
    return x_gradient_BLD, by_platform("product", _narrower_first, _weight_gradient, x_BLD, gradient_BLF)


def _weight_gradient(x_BLD: Array, gradient_BLF: Array) -> Array:
    return lax.dot_general(x_BLD, gradient_BLF, (((0, 1), (0, 1)), ((), ())))


def _narrower_first(x_BLD: Array, gradient_BLF: Array) -> Array:
    """Returns the gradient with the narrower factor transposed, which needs less memory than transposing the wider."""
    return lax.optimization_barrier(_weight_gradient(gradient_BLF, x_BLD)).T


_product.defvjp(lambda x_BLD, weight_DF: (x_BLD @ weight_DF, (x_BLD, weight_DF)), _backward)


def weight_first(x: Array, weight: Array) -> tuple[Array, Array]:
    """Returns both factors of a product unchanged; in backward, the gradient of `x` waits for that of `weight`."""
    return _weight_first(*_vary_alike(x, weight))


@jax.custom_vjp
def _weight_first(x: Array, weight: Array) -> tuple[Array, Array]:
    return x, weight


def _weight_first_backward(_: None, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
    return by_platform("weight_first", _weight_gradient_first, lambda dx, dweight: (dx, dweight), *gradients)


def _weight_gradient_first(dx: Array, dweight: Array) -> tuple[Array, Array]:
    dx, dweight = lax.optimization_barrier((dx, dweight))
    return order_after(dweight, dx), dweight


_weight_first.defvjp(lambda x, weight: ((x, weight), None), _weight_first_backward)
