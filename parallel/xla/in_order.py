"""Waiting: a value that is there only once others are. On simulated devices; elsewhere nothing waits.

XLA:CPU starts the collectives of one computation in the order of the program, and each is done when it returns. A loop
is not: where nothing that follows needs its result, what follows starts while the loop still runs. A device that is
short of threads then meets the others in the wrong collective; all wait for one another for ever, or take each other's
numbers. So a collective outside a loop of collectives waits for the loop, or the loop for it: as data, since XLA:CPU
drops every weaker tie. Other platforms start all collectives in the order of the program, and see none of this.

There is one way to wait, `after`. Gathers and scatters wait for loops (`apart`, `scatter_first`, `recomputed_late`, and
their uses), a stage's second message for its first (`executor/message.py`), and each part of a tick for the one before
it (`executor/tick.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from .platform import by_platform

Tree = TypeVar("Tree")
Params = TypeVar("Params")


def after(done: Any, value: Tree, *, integers: bool = False) -> Tree:
    """Values, unchanged, which on simulated devices are there once others are.

    Args:
        done: Any pytree of arrays, e.g. what collectives brought. No gradient flows to it.
        value: Another; its differentiable leaves wait.
        integers: Whether its other leaves wait too.
    """
    leaves = [leaf for leaf in jax.tree.leaves(done) if leaf.size]
    if not leaves:
        return value
    if integers:
        return by_platform("order", _once_there, lambda done, value: value, leaves, value)
    return jax.tree.map(lambda leaf: _after(leaves, leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, value)


def apart(params: Params, x: Tree) -> tuple[Params, Tree]:
    """Both unchanged: what a block with loops of collectives is run on.

    Args:
        params: What its gathers brought: they come before its loops.
        x: Its activations. In backward their gradient, and with it all loops, comes before that of `params` is reduced.
    """
    return _apart(params, after(params, x))


@jax.custom_vjp
def _apart(params: Params, x: Tree) -> tuple[Params, Tree]:
    return params, x


def _apart_backward(_: None, gradients: tuple[Params, Any]) -> tuple[Params, Any]:
    dparams, dx = gradients
    return after([leaf for leaf in jax.tree.leaves(dx) if leaf.dtype != jax.dtypes.float0], dparams), dx


_apart.defvjp(lambda params, x: ((params, x), None), _apart_backward)


@jax.custom_vjp
def scatter_first(shards: Any, value: Tree) -> tuple[Any, Tree]:
    """Both unchanged; in backward, what reduces the gradients of `shards` comes before what `value` is made of.

    Args:
        shards: Parameters that are used after a loop; their gradients are reduced where `fsdp.attach` says.
        value: What leaves the loop.
    """
    return shards, value


def _scatter_first_backward(_: None, gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    scattered, value = gradients
    return scattered, after(scattered, value)


scatter_first.defvjp(lambda shards, value: ((shards, value), None), _scatter_first_backward)


def recomputed_late(block: Callable[..., Tree], *, inputs_alone: bool) -> Callable[..., Tree]:
    """A block whose backward starts, on simulated devices, only once the gradient of its result is there.

    Where forward and backward of a block lie in one computation, XLA would merge what `jax.checkpoint` recomputes with
    what forward computed, and keep it till then: gathered parameters, of every block. Other platforms are held back by
    the barrier of `prevent_cse`, which XLA:CPU may drop.

    Args:
        block: A function of arrays, made by `jax.checkpoint`.
        inputs_alone: Whether it is enough that the block's inputs wait, where all else that it keeps is used as it is;
            otherwise all its residuals wait.
    """

    def forward(*inputs: Any) -> tuple[Tree, Any]:
        y, pull = jax.vjp(block, *inputs)
        leaves, treedef = jax.tree.flatten(pull)
        own = {id(leaf) for leaf in jax.tree.leaves(inputs)}
        waits = tuple(not inputs_alone or id(leaf) in own for leaf in leaves)
        residuals = ([leaf for leaf, each in zip(leaves, waits, strict=True) if each is flag] for flag in (True, False))
        return y, Partial(partial(_pull_late, treedef, waits), *residuals)

    def backward(pull: Any, gradient: Any) -> Any:
        return pull(gradient)

    run = jax.custom_vjp(block)
    run.defvjp(forward, backward)
    return run


def _pull_late(treedef: Any, waits: tuple[bool, ...], waiting: list[Any], others: list[Any], gradient: Any) -> Any:
    done = [leaf for leaf in jax.tree.leaves(gradient) if leaf.dtype != jax.dtypes.float0]
    late, free = iter(after(done, waiting)), iter(others)
    return jax.tree.unflatten(treedef, [next(late if each else free) for each in waits])(gradient)


@jax.custom_vjp
def _after(done: list[Array], value: Array) -> Array:
    return by_platform("order", _once_there, lambda done, value: value, done, value)


_after.defvjp(lambda done, value: (_after(done, value), None), lambda _, gradient: (None, gradient))


def _once_there(done: list[Array], value: Tree) -> Tree:
    """The value, by a choice that is always the same, as XLA does not know."""
    signs = [leaf.ravel()[0] >= 0 for leaf in done]
    never = sum((sign.astype(jnp.int32) for sign in signs), jnp.zeros((), jnp.int32)) > len(signs)
    return jax.tree.map(lambda leaf: jnp.where(never, jnp.zeros_like(leaf), leaf), value)
