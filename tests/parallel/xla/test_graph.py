"""A function as a graph: calls opened up, and functions made of some of its operations."""

import jax
import jax.numpy as jnp
from jax import lax
from spmdkit.parallel.xla.graph import equations, inner_programs, run_equations, trace


def function(x, w):
    return {"y": jax.checkpoint(jax.jit(lambda x: jnp.sin(x) @ w))(x) + jnp.arange(2.0)[None]}


X, W = jnp.asarray([[1.0, 2.0]]), jnp.asarray([[1.0, 2.0], [3.0, 4.0]])


def test_calls_are_opened_up():
    graph, shapes = trace(function, X, W)
    names = [equation.primitive.name for equation in graph.equations]
    assert names.count("sin") == names.count("dot_general") == 1
    assert shapes["y"].shape == (1, 2)
    assert len(graph.inputs) == 2


def test_run_equations_computes_the_function():
    graph, _ = trace(function, X, W)
    (y,) = run_equations(graph, graph.equations, graph.inputs, graph.outputs)(X, W)
    assert jnp.array_equal(y, function(X, W)["y"])


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
