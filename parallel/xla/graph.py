"""A traced function as a graph of operations, and functions that run some of its operations."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.core import eval_jaxpr

from ...mesh.compat import Equation, Variable, is_literal
from .primitives import CALLS, COLLECTIVES


class Graph(NamedTuple):
    """A function as a list of its operations, with nested calls inlined.

    Attributes:
        equations: The operations, in an order in which they can run.
        inputs: A variable for each leaf of the arguments.
        outputs: A variable (or literal) for each leaf of the results.
        constants: The values that the function closes over, by variable.
        jaxpr: The graph as a jaxpr.
    """

    equations: list[Equation]
    inputs: list[Variable]
    outputs: list[Variable]
    constants: dict[Variable, Any]
    jaxpr: Any


def trace(function: Callable[..., Any], *arguments: Any) -> tuple[Graph, Any]:
    """Traces a function into a graph, for the types of its arguments (inside `shard_map`, including their varying
    axes).

    Returns:
        The graph, and the shapes of the results in the structure that the function returned.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)

    def inlined(*leaves: Any) -> list[Any]:
        return _run(closed.jaxpr, closed.consts, leaves)

    flat = jax.make_jaxpr(inlined)(*jax.tree.leaves(arguments))
    graph = flat.jaxpr
    constants = dict(zip(graph.constvars, flat.consts, strict=True))
    return Graph(list(graph.eqns), list(graph.invars), list(graph.outvars), constants, graph), shapes


def _run(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr and the jaxprs that it calls, one equation at a time."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

    def read(variable: Variable) -> Any:
        return variable.val if is_literal(variable) else values[variable]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLS:
            called = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
            operands = [read(variable) for variable in eqn.invars]
            results = _run(getattr(called, "jaxpr", called), getattr(called, "consts", ()), operands)
        else:
            needed = list({variable: None for variable in eqn.invars if not is_literal(variable)})
            one = jaxpr.replace(constvars=[], invars=needed, outvars=eqn.outvars, eqns=[eqn])
            results = eval_jaxpr(one, (), *map(read, needed))
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def dependencies(graph: Graph, targets: Iterable[Variable]) -> tuple[list[Equation], set[Variable]]:
    """Finds everything that some variables depend on.

    Args:
        graph: The graph of the variables.
        targets: The variables, or literals.

    Returns:
        The operations that compute them, last to first, and every variable that these read, including the targets.
    """
    found, read = [], {variable for variable in targets if not is_literal(variable)}
    for eqn in reversed(graph.equations):
        if not read.isdisjoint(eqn.outvars):
            found.append(eqn)
            read.update(variable for variable in eqn.invars if not is_literal(variable))
    return found, read


def run_equations(
    graph: Graph, equations: list[Equation], inputs: list[Variable], outputs: list[Variable]
) -> Callable[..., list[Any]]:
    """Returns a function that runs some of a graph's operations.

    Args:
        graph: The graph.
        equations: The operations, in the graph's order.
        inputs: The variables of the function's arguments; distinct.
        outputs: The variables of its results.
    """
    needed = {variable for eqn in equations for variable in eqn.invars if not is_literal(variable)}
    needed.update(variable for variable in outputs if not is_literal(variable))
    constants = {variable: value for variable, value in graph.constants.items() if variable in needed}
    part = graph.jaxpr.replace(constvars=[], invars=[*constants, *inputs], outvars=outputs, eqns=equations)
    return partial(eval_jaxpr, part, (), *constants.values())


def operation(equation: Equation) -> Equation:
    """Returns the collective that a `shard_map` inside a step runs, see `keep_split`; other operations as they are."""
    inner = inner_programs(equation) if equation.primitive.name == "shard_map" else ()
    return next((each for program in inner for each in program.eqns if each.primitive.name in COLLECTIVES), equation)


def inner_programs(equation: Any) -> list[Any]:
    """Returns the programs (jaxprs) that an operation runs, such as a loop's body or a function under `jit`."""
    values = equation.params.values()
    listed = (each for value in values for each in (value if isinstance(value, tuple | list) else (value,)))
    programs = (getattr(each, "jaxpr", each) for each in listed)
    return [each for each in programs if hasattr(each, "eqns")]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every operation (equation) of a program, each before those of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations(inner)
