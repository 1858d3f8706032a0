"""A function as a graph: calls opened up, and functions made of some of its operations."""

import jax
import jax.numpy as jnp
from spmdkit.parallel.xla.graph import run_equations, trace


def function(x, w):
    return {"y": jax.checkpoint(jax.jit(lambda x: jnp.sin(x) @ w))(x) + jnp.arange(2.0)[None]}


X, W = jnp.asarray([[1.0, 2.0]]), jnp.asarray([[1.0, 2.0], [3.0, 4.0]])


def test_calls_are_opened_up():
    graph, shapes = trace(function, X, W)
    names = [equation.primitive.name for equation in graph.equations]
    assert names.count("sin") == names.count("dot_general") == 1
    assert shapes["y"].shape == (1, 2)
    assert len(graph.inputs) == 2


def test_all_of_it_is_the_function():
    graph, _ = trace(function, X, W)
    (y,) = run_equations(graph, graph.equations, graph.inputs, graph.outputs)(X, W)
    assert jnp.array_equal(y, function(X, W)["y"])


def test_a_part_of_it_starts_from_what_it_is_given():
    graph, _ = trace(function, X, W)
    names = [equation.primitive.name for equation in graph.equations]
    first = names.index("sin")
    (between,) = graph.equations[first].outvars
    rest = run_equations(graph, graph.equations[first + 1 :], [graph.inputs[1], between], graph.outputs)
    assert jnp.array_equal(rest(W, jnp.sin(X))[0], function(X, W)["y"])
