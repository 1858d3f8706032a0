"""Orders collectives on simulated devices by making values wait for other values; other platforms need no waits.

XLA:CPU starts the collectives of one computation in program order, and a collective is complete when it returns. This
does not hold for loops: if no later operation needs the result of a loop, later operations start while it still runs. A
device that is short of threads can then be in another collective than its peers, and they deadlock or exchange wrong
values. Therefore a collective outside a loop of collectives waits for the loop, or the loop waits for the collective.
The wait is a data dependency, because XLA:CPU drops every weaker constraint. Other platforms start all collectives in
program order.

`order_after` implements all waits on simulated devices. Gathers and scatters wait for loops (`order_block`,
`scatter_first`, `delay_recompute`), a stage's second message waits for its first, and each part of a tick waits for the
previous one (`executor/tick.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import Partial

from .platform import by_platform

Tree = TypeVar("Tree")
Params = TypeVar("Params")


def order_after(done: Any, value: Tree, *, integers: bool = False) -> Tree:
    """Returns a value unchanged; on simulated devices it is available only after other values.

    Args:
        done: Any pytree of arrays, such as the results of collectives. It does not receive a gradient.
        value: Any pytree; its floating-point leaves wait.
        integers: Whether the other leaves of `value` wait too.
    """
    leaves = [leaf for leaf in jax.tree.leaves(done) if leaf.size]
    if not leaves:
        return value
    if integers:
        return by_platform("order", _wait, lambda done, value: value, leaves, value)
    return jax.tree.map(
        lambda leaf: _order_after(leaves, leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, value
    )


def order_block(params: Params, x: Tree) -> tuple[Params, Tree]:
    """Returns the inputs of a block that contains loops of collectives, ordered with respect to these loops.

    Args:
        params: The gathered parameters. Their gathers run before the loops.
        x: The activations. In backward, their gradient, and therefore every loop, is computed before the gradient of
            `params` is reduced.
    """
    return _order_block(params, order_after(params, x))


@jax.custom_vjp
def _order_block(params: Params, x: Tree) -> tuple[Params, Tree]:
    return params, x


def _order_block_backward(_: None, gradients: tuple[Params, Any]) -> tuple[Params, Any]:
    dparams, dx = gradients
    return order_after(_differentiable(dx), dparams), dx


_order_block.defvjp(lambda params, x: ((params, x), None), _order_block_backward)


@jax.custom_vjp
def scatter_first(shards: Any, value: Tree) -> tuple[Any, Tree]:
    """Returns both unchanged; in backward, the gradients of `shards` are reduced before the loop behind `value` runs.

    Other platforms would reduce them after the loop, and keep the whole gradients in memory until then; a barrier
    prevents this (Llama-3 8B on fsdp 8: 12.9 instead of 14.8 GB of temporaries, compiled for H100s).

    Args:
        shards: Parameters that are used after a loop; their gradients are reduced by `fsdp.attach`.
        value: The result of the loop.
    """
    return shards, value


def _scatter_first_backward(_: None, gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    scattered, value = gradients
    leaves, treedef = jax.tree.flatten((scattered, order_after(scattered, value)))
    floating = [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]
    held = iter(by_platform("order", lambda leaves: leaves, lax.optimization_barrier, floating))
    return treedef.unflatten([leaf if leaf.dtype == jax.dtypes.float0 else next(held) for leaf in leaves])


scatter_first.defvjp(lambda shards, value: ((shards, value), None), _scatter_first_backward)


def delay_recompute(block: Callable[..., Tree], *, inputs_only: bool) -> Callable[..., Tree]:
    """Returns a block whose backward, on simulated devices, starts only after the gradient of its result.

    If forward and backward of a block are in one computation, XLA would merge the recomputation of `jax.checkpoint`
    with forward and keep the results, such as the gathered parameters of every block. On other platforms the barrier of
    `prevent_cse` prevents this, but XLA:CPU may drop it.

    Args:
        block: A function of arrays, made by `jax.checkpoint`.
        inputs_only: Whether only the block's inputs have to wait, because its other residuals are used unchanged;
            otherwise all residuals wait.
    """

    def forward(*inputs: Any) -> tuple[Tree, Any]:
        y, pull = jax.vjp(block, *inputs)
        leaves, treedef = jax.tree.flatten(pull)
        own = {id(leaf) for leaf in jax.tree.leaves(inputs)}
        waits = tuple(not inputs_only or id(leaf) in own for leaf in leaves)
        residuals = ([leaf for leaf, each in zip(leaves, waits, strict=True) if each is flag] for flag in (True, False))
        return y, Partial(partial(_pull_late, treedef, waits), *residuals)

    run = jax.custom_vjp(block)
    run.defvjp(forward, lambda pull, gradient: pull(gradient))
    return run


def _pull_late(treedef: Any, waits: tuple[bool, ...], waiting: list[Any], others: list[Any], gradient: Any) -> Any:
    late, free = iter(order_after(_differentiable(gradient), waiting)), iter(others)
    return jax.tree.unflatten(treedef, [next(late if each else free) for each in waits])(gradient)


def _differentiable(gradient: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(gradient) if leaf.dtype != jax.dtypes.float0]


@jax.custom_vjp
def _order_after(done: list[Array], value: Array) -> Array:
    return by_platform("order", _wait, lambda done, value: value, done, value)


_order_after.defvjp(lambda done, value: (_order_after(done, value), None), lambda _, gradient: (None, gradient))


def _wait(done: list[Array], value: Tree) -> Tree:
    """Returns the value through a selection that always has the same result, which XLA cannot see."""
    signs = [leaf.ravel()[0] >= 0 for leaf in done]
    never = sum((sign.astype(jnp.int32) for sign in signs), jnp.zeros((), jnp.int32)) > len(signs)
    return jax.tree.map(lambda leaf: jnp.where(never, jnp.zeros_like(leaf), leaf), value)
