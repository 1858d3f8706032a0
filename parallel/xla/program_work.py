"""The work of a traced program: the operations of its products and convolutions, and of their gradients.

Each product counts 2 operations for a multiplication and its addition, as often as its loop runs. Forward counts it
once; backward once more for each operand that parameters reach, because the gradient of an operand is a product of the
same size. So a layer on the data has no gradient of its inputs, a frozen layer none of its parameters, and what
`stop_gradient` closes off none at all. Recomputation (`jax.checkpoint`) does not count, nor do lookups, norms, softmax
and other operations on single elements.

A kernel of Pallas, a foreign function and a loop of unknown length state no operations: the program then has
`uncounted` operations, and the sums are incomplete.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...mesh.compat import carried_by_scan, is_literal, line_of
from .graph import inner_programs
from .primitives import FUSED_ATTENTION

UNCOUNTED = ("pallas_call", "custom_call", "ffi_call", "pure_callback", "io_callback", "xla_call_module")
"""Primitives that run code which does not state its operations."""


class Work(NamedTuple):
    """The work of a program.

    Attributes:
        forward: Operations of its products.
        backward: Operations of the products in the gradients of its parameters.
        touched: Bytes of the values that its products read and write, each value once, without parameters.
        products: Its products.
        uncounted: What has an unknown number of operations, each with its source line; () if the sums are complete.
    """

    forward: float = 0.0
    backward: float = 0.0
    touched: float = 0.0
    products: float = 0.0
    uncounted: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """Operations of forward and backward."""
        return self.forward + self.backward

    def plus(self, other: "Work") -> "Work":
        """Returns the work of both."""
        return Work(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            touched=self.touched + other.touched,
            products=self.products + other.products,
            uncounted=tuple(dict.fromkeys((*self.uncounted, *other.uncounted))),
        )

    def times(self, factor: float) -> "Work":
        """Returns the work of several runs."""
        return Work(
            forward=factor * self.forward,
            backward=factor * self.backward,
            touched=factor * self.touched,
            products=factor * self.products,
            uncounted=self.uncounted,
        )


class Origin(NamedTuple):
    """The values that one value depends on.

    Attributes:
        parameters: True if a gradient passes from it to a parameter.
        rows: True if it depends on the rows of the batch.
    """

    parameters: bool = False
    rows: bool = False


PARAMETER = Origin(parameters=True)
ROWS = Origin(rows=True)


def count_work(jaxpr: Any, origins: Sequence[Origin]) -> Work:
    """Returns the work of a program and of the gradients of its first result.

    Args:
        jaxpr: The program, traced without gradients.
        origins: `PARAMETER`, `ROWS` or `Origin()` of each of its inputs.
    """
    differentiated = [number == 0 for number, _ in enumerate(jaxpr.outvars)]
    return _Program(jaxpr, differentiated).count(origins)[0]


@dataclass
class _Program:
    """A program that is counted.

    Attributes:
        jaxpr: The program.
        differentiated: Whether gradients pass through each of its results.
        needed: Whether each of its results is used; all by default.
        touched: The values whose bytes are counted already.
    """

    jaxpr: Any
    differentiated: Sequence[bool]
    needed: Sequence[bool] = ()
    touched: set[Any] = field(default_factory=set)

    def count(self, origins: Sequence[Origin]) -> tuple[Work, list[Origin]]:
        """Returns the work, and the origins of the results."""
        jaxpr = self.jaxpr
        known: dict[Any, Origin] = dict.fromkeys(jaxpr.constvars, Origin())
        known.update(zip(jaxpr.invars, origins, strict=True))
        used = _needed_by(jaxpr, self.needed or [True] * len(jaxpr.outvars))
        passed = _passed_by_gradients(jaxpr, self.differentiated)
        work = Work()
        for equation in jaxpr.eqns:
            needed = [variable in used for variable in equation.outvars]
            if not any(needed) and not equation.effects:
                continue
            reads = [Origin() if is_literal(variable) else known[variable] for variable in equation.invars]
            differentiated = [variable in passed for variable in equation.outvars]
            added, results = self._equation(equation, reads, differentiated, needed)
            work = work.plus(added)
            for variable, origin in zip(equation.outvars, results, strict=True):
                known[variable] = origin if _is_float(variable.aval) else origin._replace(parameters=False)
        return work, [Origin() if is_literal(variable) else known.get(variable, Origin()) for variable in jaxpr.outvars]

    def _equation(
        self, equation: Any, reads: list[Origin], differentiated: list[bool], needed: list[bool]
    ) -> tuple[Work, list[Origin]]:
        name = equation.primitive.name
        if name in FLOPS:
            return self._product(equation, reads, any(differentiated))
        if name in UNCOUNTED:
            return Work(uncounted=(f"{name} in {line_of(equation)}",)), _joined(equation, reads)
        if name in CONTROL:
            return CONTROL[name](equation, reads, any(differentiated))
        bodies = inner_programs(equation)
        if len(bodies) == 1 and len(bodies[0].outvars) == len(equation.outvars):
            inputs = reads[len(reads) - len(bodies[0].invars) :]
            return _Program(bodies[0], differentiated, needed).count(inputs)
        work = Work()
        for body in bodies:
            inputs = [_join(reads)] * len(body.invars)
            work = work.plus(_Program(body, [any(differentiated)] * len(body.outvars)).count(inputs)[0])
        results = _joined(equation, reads)
        if name == "stop_gradient":
            results = [origin._replace(parameters=False) for origin in results]
        return work, results

    def _product(self, equation: Any, reads: list[Origin], differentiated: bool) -> tuple[Work, list[Origin]]:
        flops = FLOPS[equation.primitive.name](equation)
        gradients = sum(origin.parameters for origin in reads) if differentiated else 0
        touched = 0
        values = [variable for variable, origin in zip(equation.invars, reads, strict=True) if origin.rows]
        for variable in [*values, *equation.outvars]:
            if variable not in self.touched:
                self.touched.add(variable)
                touched += variable.aval.size * variable.aval.dtype.itemsize
        return Work(flops, gradients * flops, touched, 1), _joined(equation, reads)


def _needed_by(jaxpr: Any, needed: Sequence[bool]) -> set[Any]:
    """Returns the variables that some of the results depend on."""
    found = {variable for variable, is_needed in zip(jaxpr.outvars, needed, strict=True) if is_needed}
    found = {variable for variable in found if not is_literal(variable)}
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not found.isdisjoint(equation.outvars):
            found.update(variable for variable in equation.invars if not is_literal(variable))
    return found


def _passed_by_gradients(jaxpr: Any, differentiated: Sequence[bool]) -> set[Any]:
    """Returns the variables through which gradients of some of the results pass."""
    pairs = zip(jaxpr.outvars, differentiated, strict=True)
    found = {variable for variable, is_passed in pairs if is_passed and not is_literal(variable)}
    for equation in reversed(jaxpr.eqns):
        if equation.primitive.name == "stop_gradient" or found.isdisjoint(equation.outvars):
            continue
        floats = [variable for variable in equation.invars if _is_float(variable.aval)]
        found.update(variable for variable in floats if not is_literal(variable))
    return found


def _scan(equation: Any, reads: list[Origin], differentiated: bool) -> tuple[Work, list[Origin]]:
    params = equation.params
    carried = carried_by_scan(equation)
    body = params["jaxpr"].jaxpr
    work, results = _looped(body, reads, carried.start, carried.stop, differentiated)
    return work.times(params["length"]), results


def _looped(body: Any, reads: list[Origin], first: int, last: int, differentiated: bool) -> tuple[Work, list[Origin]]:
    """Returns the work of one turn, and the origins of its results once those of the carried values have settled."""
    while True:
        work, results = _Program(body, [differentiated] * len(body.outvars)).count(reads)
        carried = [_join(pair) for pair in zip(reads[first:last], results, strict=False)]
        if carried == reads[first:last]:
            return work, results
        reads = [*reads[:first], *carried, *reads[last:]]


def _while(equation: Any, reads: list[Origin], _: bool) -> tuple[Work, list[Origin]]:
    """JAX does not differentiate these loops: only forward runs them."""
    params = equation.params
    first = params["cond_nconsts"]
    constants = params["body_nconsts"]
    inputs = reads[first:]
    work, results = _looped(params["body_jaxpr"].jaxpr, inputs, constants, len(inputs), False)
    test = [*reads[:first], *inputs[constants:]]
    work = work.plus(_Program(params["cond_jaxpr"].jaxpr, [False]).count(test)[0])
    if work.products or work.uncounted:
        work = Work(uncounted=(f"a loop of unknown length with products in {line_of(equation)}",))
    return work, [origin._replace(parameters=False) for origin in results]


def _cond(equation: Any, reads: list[Origin], differentiated: bool) -> tuple[Work, list[Origin]]:
    """Counts the branch with the most operations; among implementations for platforms, those that state theirs."""
    passed = [differentiated] * len(equation.outvars)
    counted = [_Program(branch.jaxpr, passed).count(reads[1:]) for branch in equation.params["branches"]]
    works = [work for work, _ in counted]
    if equation.params.get("branches_platforms"):
        works = [work for work in works if not work.uncounted] or works
    most = max(works, key=lambda work: work.flops)
    for work in works:
        most = most._replace(uncounted=most.uncounted or work.uncounted)
    results = [_join(origins) for origins in zip(*(results for _, results in counted), strict=True)]
    return most, results


CONTROL: dict[str, Callable[[Any, list[Origin], bool], tuple[Work, list[Origin]]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def _join(origins: Sequence[Origin]) -> Origin:
    return Origin(any(origin.parameters for origin in origins), any(origin.rows for origin in origins))


def _joined(equation: Any, reads: list[Origin]) -> list[Origin]:
    return [_join(reads)] * len(equation.outvars)


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", jnp.int32), jnp.inexact)


def _dot_flops(equation: Any) -> float:
    contracted = equation.params["dimension_numbers"][0][0]
    shape = equation.invars[0].aval.shape
    return 2.0 * equation.outvars[0].aval.size * prod(shape[dim] for dim in contracted)


def _convolution_flops(equation: Any) -> float:
    """Counts positions in the padding, and not the zeros that a transposed convolution inserts."""
    kernel = equation.invars[1].aval
    features = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
    inserted = prod(equation.params["lhs_dilation"])
    return 2.0 * equation.outvars[0].aval.size * kernel.size / features / inserted


def _ragged_flops(equation: Any) -> float:
    """Each row of the left matrix is multiplied with the matrix of its own group."""
    left, right = equation.invars[0].aval, equation.invars[1].aval
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    taken = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2.0 * left.size * prod(size for dim, size in enumerate(right.shape) if dim not in taken)


def _attention_flops(equation: Any) -> float:
    """Two products over the full square of positions: query (B, L, H, K), key (B, S, G, K)."""
    query, key = equation.invars[0].aval, equation.invars[1].aval
    return 4.0 * query.size * key.shape[1]


FLOPS: dict[str, Callable[[Any], float]] = {
    "dot_general": _dot_flops,
    "conv_general_dilated": _convolution_flops,
    "ragged_dot": _ragged_flops,
    "ragged_dot_general": _ragged_flops,
    FUSED_ATTENTION: _attention_flops,
}
"""Products: primitive -> operations."""
