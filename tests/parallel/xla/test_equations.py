"""Every operation of a program is found, in the programs inside it too."""

import jax
import jax.numpy as jnp
from jax import lax
from spmdkit.parallel.xla.equations import equations, inner_programs


@jax.custom_vjp
def squared(x):
    return x * jnp.sin(x)


squared.defvjp(lambda x: (squared(x), x), lambda x, dy: (2 * x * dy,))


def program(x):
    looped = lax.fori_loop(0, 3, lambda _, each: jnp.tanh(each), x)
    chosen = lax.cond(x.sum() > 0, jnp.exp, jnp.log1p, looped)
    return jax.jit(jnp.cos)(squared(chosen))


def test_operations_inside_loops_branches_and_functions():
    found = list(equations(jax.make_jaxpr(program)(jnp.ones(3)).jaxpr))
    names = [each.primitive.name for each in found]
    assert {"tanh", "exp", "log1p", "cos", "sin"} <= set(names)
    assert names.index("cond") < names.index("exp")
    branches = next(each for each in found if each.primitive.name == "cond")
    assert len(inner_programs(branches)) == 2
    assert inner_programs(found[names.index("tanh")]) == []
