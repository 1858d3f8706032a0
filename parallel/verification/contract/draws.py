"""Initial parameters whose random numbers the host draws: a program without them is compiled in a third of the time.

Most models draw one array for each parameter, and XLA compiles every draw anew. The contract needs numbers of the right
distribution and no particular ones, so normal and uniform draws are taken out of the traced function, made by NumPy and
given to it as arguments. Any other draw, or one inside a loop, stays where it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import eval_jaxpr

from ....mesh.compat import Equation, is_literal
from .probe import compile_quickly

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def with_host_draws(function: Callable[[Array], Any], key: Array) -> Any:
    """What a function of a key returns, its own draws of random numbers replaced by others of the same distribution.

    Args:
        function: Traceable.
        key: A key; also the seed of the host's draws.

    Returns:
        Arrays of the default device, in the structure that the function returns.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(key)
    jaxpr, draws = closed.jaxpr, [_draw(equation) for equation in closed.jaxpr.eqns]
    drawn = [equation.outvars[0] for equation, draw in zip(jaxpr.eqns, draws, strict=True) if draw]
    kept = [equation for equation, draw in zip(jaxpr.eqns, draws, strict=True) if not draw]
    rest = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars, *drawn], eqns=kept)
    random = np.random.default_rng(np.asarray(jax.random.key_data(key)).reshape(-1))
    made = [
        np.asarray(draw(random, variable.aval.shape)).astype(variable.aval.dtype)
        for variable, draw in zip(drawn, filter(None, draws), strict=True)
    ]
    arguments = [*closed.consts, key, *made]
    leaves = compile_quickly(lambda *values: eval_jaxpr(rest, (), *values), *arguments)(*arguments)
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)


def _draw(equation: Equation) -> Draw | None:
    """How the host draws what an equation draws; None where it draws nothing, or something else."""
    bounds = equation.invars[1:]
    if len(equation.outvars) != 1 or not all(is_literal(bound) for bound in bounds):
        return None
    if not jnp.issubdtype(getattr(equation.outvars[0].aval, "dtype", np.int32), jnp.floating):
        return None
    low_high = [float(bound.val) for bound in bounds]
    return {
        ("_normal", 0): lambda random, shape: random.standard_normal(shape, np.float32),
        ("_uniform", 2): lambda random, shape: random.uniform(*low_high, shape),
        ("_truncated_normal", 2): lambda random, shape: _truncated(random, shape, *low_high),
    }.get((equation.params.get("name", ""), len(bounds)))


def _truncated(random: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    """A normal distribution within bounds: what is outside is drawn again, and in the end put on the bound."""
    found = random.standard_normal(shape, np.float32)
    for _ in range(100):
        outside = (found < low) | (found > high)
        if not outside.any():
            return found
        found[outside] = random.standard_normal(int(outside.sum()), np.float32)
    return np.clip(found, low, high)
