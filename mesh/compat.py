"""Everything that depends on the version of JAX, or on a name JAX does not export."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jaxlib.version
from jax._src import distributed, xla_bridge
from jax.core import eval_jaxpr
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType

Device: TypeAlias = Any
"""A `jax.Device`, which JAX does not export as a type."""

PyTreeDef: TypeAlias = Any
"""A `jax.tree_util.PyTreeDef`, which JAX does not export as a type."""


def backend_started() -> bool:
    """Tells whether JAX has opened its devices already, without opening them.

    Returns:
        True once any backend is initialised; device counts can no longer change then.
    """
    return bool(xla_bridge.backends_are_initialized())


def quick_compiler_options() -> dict[str, Any]:
    """Options of a program that is compiled for a few runs: on CPU, JAX 0.10 has an older code generator.

    It compiles a transformer's loss in 0.54 of the time (0.28 s of 0.52 s of processor; 2 cores, November 2026).
    """
    if jaxlib.version.__version_info__[:2] != (0, 10) or jax.default_backend() != "cpu":
        return {}
    return {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


def make_abstract_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> AbstractMesh:
    """Builds a mesh without devices whose axes are all Auto.

    Args:
        shape: One size per axis.
        axis_names: One name per axis.

    Returns:
        The abstract mesh; enough to lower and type a program.
    """
    return AbstractMesh(shape, axis_names, axis_types=(AxisType.Auto,) * len(axis_names))


def varying_axes(value: Any) -> frozenset[str]:
    """The mesh axes over which a value inside `shard_map` is typed as different on each device."""
    aval = jax.typeof(value)
    return frozenset(aval.vma if hasattr(aval, "vma") else aval.mat.varying)


Variable: TypeAlias = Any
"""A `jax.extend.core.Var` (or a `Literal`): one value of a traced function."""

Equation: TypeAlias = Any
"""A `jax.extend.core.JaxprEqn`: one operation of a traced function."""

_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"))


class Graph(NamedTuple):
    """A function as the list of its operations, calls of other functions opened up.

    Attributes:
        equations: The operations, in an order in which they can run.
        inputs: A variable for each leaf of the arguments.
        outputs: A variable (or literal) for each leaf of the results.
        constants: Values that the function closes over, by variable.
        jaxpr: The same, as JAX holds it.
    """

    equations: list[Equation]
    inputs: list[Variable]
    outputs: list[Variable]
    constants: dict[Variable, Any]
    jaxpr: Any


def trace(function: Callable[..., Any], *arguments: Any) -> tuple[Graph, Any]:
    """Traces a function into a graph, for the types of the arguments (inside `shard_map`, what they vary over too).

    Returns:
        The graph and the shapes of the results, in the structure that the function gave them.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)

    def opened(*leaves: Any) -> list[Any]:
        return _run(closed.jaxpr, closed.consts, leaves)

    flat = jax.make_jaxpr(opened)(*jax.tree.leaves(arguments))
    graph = flat.jaxpr
    constants = dict(zip(graph.constvars, flat.consts, strict=True))
    return Graph(list(graph.eqns), list(graph.invars), list(graph.outvars), constants, graph), shapes


def _run(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr one equation at a time, and the insides of its calls likewise."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

    def read(variable: Variable) -> Any:
        return variable.val if is_literal(variable) else values[variable]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CALLS:
            called = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
            operands = [read(variable) for variable in eqn.invars]
            results = _run(getattr(called, "jaxpr", called), getattr(called, "consts", ()), operands)
        else:
            needed = list({variable: None for variable in eqn.invars if not is_literal(variable)})
            one = jaxpr.replace(constvars=[], invars=needed, outvars=eqn.outvars, eqns=[eqn])
            results = eval_jaxpr(one, (), *map(read, needed))
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def run_equations(
    graph: Graph, equations: list[Equation], inputs: list[Variable], outputs: list[Variable]
) -> Callable[..., list[Any]]:
    """Makes a function of some of a graph's operations.

    Args:
        graph: The graph they are from.
        equations: The operations, in the graph's order.
        inputs: What the function is given, one value each; distinct.
        outputs: What it returns.
    """
    needed = {variable for eqn in equations for variable in eqn.invars if not is_literal(variable)}
    needed.update(variable for variable in outputs if not is_literal(variable))
    constants = {variable: value for variable, value in graph.constants.items() if variable in needed}
    part = graph.jaxpr.replace(constvars=[], invars=[*constants, *inputs], outvars=outputs, eqns=equations)

    def run(*values: Any) -> list[Any]:
        return eval_jaxpr(part, (), *constants.values(), *values)

    return run


def is_literal(variable: Variable) -> bool:
    """Whether a variable is no variable, but a scalar written into its equation."""
    return isinstance(variable, Literal)


def coordination_client() -> Any:
    """The client of JAX's coordination service in this process; None where it is the only one."""
    return distributed.global_state.client
