"""Recomputes a small function in backward, so that nothing inside it has to be held from forward to backward.

`jax.checkpoint` does the same, but a policy on an outer `jax.checkpoint` (a block whose parameters are gathered has
one) looks inside an inner one and keeps what it finds there. A function with its own gradient stays closed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array


def recompute(function: Callable[..., Array]) -> Callable[..., Array]:
    """Wraps a function so that backward keeps its arguments alone.

    Args:
        function: Takes arrays by position, all differentiable, and returns one.

    Returns:
        The same function; its gradient runs it once more.
    """

    @jax.custom_vjp
    @functools.wraps(function)
    def call(*arguments: Array) -> Array:
        return function(*arguments)

    def forward(*arguments: Array) -> tuple[Array, tuple[Array, ...]]:
        return function(*arguments), arguments

    def backward(arguments: tuple[Array, ...], gradient: Array) -> Any:
        return jax.vjp(function, *arguments)[1](gradient)

    call.defvjp(forward, backward)
    return call
