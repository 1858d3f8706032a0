"""Splits a block into three functions: forward, backward to the input, and backward to the weights.

Autodiff returns forward and backward of a block as one graph. Here the graph is traced once, and each operation is
assigned to the first part that needs it:

    F   operations for the output y
    B   further operations for dx, the gradient of the input
    W   further operations for the gradients of the parameters

    forward(params, x, extra)                               -> y, residuals     in F's tick
    recompute(params, x, extra)                             -> residuals        in R's tick, if a stage recomputes
    backward_input(params, extra, residuals, dy)            -> dx, deferred     in B's tick
    backward_weight(params, extra, residuals, deferred)     -> gradients        in W's tick, at once or much later

A product Out = In W in a block becomes three matrix products, one in each part: In W, dOut W^T, In^T dOut.

1. *Residuals* are values that F computes or receives and that B or W use. *Deferred* values are values that B computes
   or receives and that W uses: the gradients dOut of the products in W. A schedule holds residuals from F to W, and
   deferred values from B to W.
2. Values that depend only on parameters and extra (a random key) are never held: each part that uses them computes them
   again. Operations through which W would use gathered parameters (a norm that `jax.checkpoint` recomputes) are moved
   to B. FSDP's gathers are therefore in F, R and B, not in W, and no gathered parameter outlives its tick. The
   reduce-scatter is the last operation of a gradient, so it is in W.
3. If a value is only a moved, cast or sliced copy of another, the smaller of the two is held, and only that one.
4. A gradient that is only a sum over rows (a norm's scale, a bias) is computed in B, and held instead of its terms.
5. Values that a model recomputes in backward (`jax.checkpoint`, a custom gradient) are not needed for y, so they are
   computed in B: the model still decides how much is held.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2 and figure 1 (the two halves of backward).
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from ...mesh.compat import Equation, Variable, is_literal
from ..model import Activations, Params, join_differentiable, split_differentiable
from ..xla.graph import Graph, operation, run_equations, trace
from ..xla.primitives import COLLECTIVES, GATHERS, MOVES, PRODUCTS

Held: TypeAlias = tuple[Array, ...]
"""Arrays that one part computes for another."""
Extra: TypeAlias = Any
"""A tree of further inputs of a block, without gradients, such as its random key."""
Indices: TypeAlias = set[int]
"""Equations by their index in the graph."""


class SplitBlock:
    """The parts of a block: per-device functions, to be called inside the `shard_map` in which they were split.

    dx and dy are lists with one array for each differentiable leaf of x, see `split_differentiable`.

    Attributes:
        residuals: The shapes and dtypes of the residuals.
        deferred: The shapes and dtypes of the deferred values.
    """

    def __init__(self, parts: "_Parts", params_treedef: Any) -> None:
        free, residuals, deferred = parts.free_inputs, parts.residuals, parts.deferred
        self.residuals, self.deferred = _shapes(residuals), _shapes(deferred)
        self._params_treedef = params_treedef
        self._num_differentiable, self._num_y, self._num_dx = len(parts.dy), len(parts.y), len(parts.dx)
        self._run_forward = parts.function([*free, *parts.inputs], [*parts.y, *residuals])
        self._run_recompute = parts.function([*free, *parts.inputs], residuals)
        self._run_input = parts.function([*free, *residuals, *parts.dy], [*parts.dx, *deferred])
        self._run_weight = parts.function([*free, *residuals, *deferred], parts.gradients)

    def forward(self, params: Params, x: Activations, extra: Extra) -> tuple[Activations, Held]:
        """Returns y and the residuals."""
        differentiable, others = split_differentiable(x)
        results = self._run_forward(*jax.tree.leaves((params, extra)), *differentiable, *others)
        y, residuals = results[: self._num_y], results[self._num_y :]
        return join_differentiable(x, y[: self._num_differentiable], y[self._num_differentiable :]), tuple(residuals)

    def recompute(self, params: Params, x: Activations, extra: Extra) -> Held:
        """Returns the residuals: runs forward without the operations that only y needs, such as the last product."""
        differentiable, others = split_differentiable(x)
        return tuple(self._run_recompute(*jax.tree.leaves((params, extra)), *differentiable, *others))

    def backward_input(
        self, params: Params, extra: Extra, residuals: Held, dy: list[Array]
    ) -> tuple[list[Array], Held]:
        """Returns dx and the deferred values."""
        results = self._run_input(*jax.tree.leaves((params, extra)), *residuals, *dy)
        return results[: self._num_dx], tuple(results[self._num_dx :])

    def backward_weight(self, params: Params, extra: Extra, residuals: Held, deferred: Held) -> Params:
        """Returns the gradients, a tree like the parameters."""
        gradients = self._run_weight(*jax.tree.leaves((params, extra)), *residuals, *deferred)
        return jax.tree.unflatten(self._params_treedef, gradients)


def _shapes(variables: list[Variable]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in variables)


def split_block(
    block: Callable[[Params, Activations, Extra], Activations], params: Params, x: Activations, extra: Extra
) -> SplitBlock:
    """Splits a block into three parts.

    Only the types of the examples matter: shapes, dtypes and, inside `shard_map`, the axes that they vary over.

    Args:
        block: `block(params, x, extra) -> x`, including its collectives.
        params: An example of one block's parameters.
        x: An example of activations.
        extra: An example of the further inputs of the block.
    """
    differentiable, others = split_differentiable(x)

    def joint(params: Params, extra: Extra, differentiable: list[Array], others: list[Array], dy: list[Array]) -> Any:
        def run(params: Params, differentiable: list[Array]) -> tuple[list[Array], list[Array]]:
            y = block(params, join_differentiable(x, differentiable, others), extra)
            return split_differentiable(y)

        y_differentiable, pull, y_others = jax.vjp(run, params, differentiable, has_aux=True)
        gradients, dx = pull(dy)
        return y_differentiable, y_others, gradients, dx

    arguments = (params, extra, differentiable, others, differentiable)
    graph, results = trace(joint, *arguments)
    sizes = [len(jax.tree.leaves(argument)) for argument in arguments]
    inputs = _groups(graph.inputs, [sizes[0] + sizes[1], sizes[2] + sizes[3], sizes[4]])
    sizes = [len(jax.tree.leaves(result)) for result in results]
    outputs = _groups(graph.outputs, [sizes[0] + sizes[1], sizes[2], sizes[3]])
    return SplitBlock(_Parts(graph, inputs, outputs), jax.tree.structure(params))


def _groups(variables: list[Variable], sizes: list[int]) -> list[list[Variable]]:
    starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    assert starts[-1] == len(variables)
    return [variables[start:stop] for start, stop in pairwise(starts)]


class _Parts:
    """The equations of F, B and W, and the variables that pass between them."""

    def __init__(self, graph: Graph, inputs: list[list[Variable]], outputs: list[list[Variable]]) -> None:
        """Splits a graph.

        Args:
            graph: Forward and backward of the block.
            inputs: The inputs of the graph: parameters and extra (`free_inputs`), x (`inputs`), and dy.
            outputs: The outputs of the graph: y, the gradients of the parameters, and dx.
        """
        self.graph = graph
        self.free_inputs, self.inputs, self.dy = free, x, dy = inputs
        self.y, self.gradients, self.dx = y, gradients, dx = outputs
        self.producer = {out: index for index, eqn in enumerate(graph.equations) for out in eqn.outvars}
        self.place = {variable: index for index, variable in enumerate([*graph.inputs, *self.producer])}
        self.free = self._free({*free, *graph.constants})
        forward = self.slice(y, given=())
        backward = self.slice(dx, given=()) - forward
        weight = self.slice(gradients, given=()) - forward - backward
        light = self._light(weight)
        backward, weight = backward | light, weight - light
        early = self._on_gathered(weight)
        backward, weight = backward | early, weight - early
        made_forward = {*x, *self._made(forward)}
        made_backward = {*dy, *self._made(backward)}
        used_later = self._used(backward | weight, [*dx, *gradients])
        self.residuals = self._fewest(used_later & made_forward, [])
        self.deferred = self._fewest(self._used(weight, gradients) & made_backward, self.residuals)

    def _free(self, free: set[Variable]) -> set[Variable]:
        """Returns all variables that depend only on parameters, extra and constants."""
        for eqn in self.graph.equations:
            if all(is_literal(operand) or operand in free for operand in eqn.invars):
                free.update(eqn.outvars)
        return free

    def _on_gathered(self, weight: Indices) -> Indices:
        """Returns the equations for which W would gather parameters again, such as those of a recomputed norm."""
        gathered: set[Variable] = set()
        early: Indices = set()
        for index, eqn in enumerate(self.graph.equations):
            used = [operand for operand in eqn.invars if not is_literal(operand)]
            touches = any(operand in gathered for operand in used)
            if all(operand in self.free for operand in used):
                gathered.update(eqn.outvars if touches or self._name(index) in GATHERS else ())
            elif touches and index in weight:
                early |= {index} | (self.slice(used, given=()) & weight)
        return early

    def _light(self, weight: Indices) -> Indices:
        """Returns the equations of gradients without matrix products, which are sums over rows and therefore small."""
        light: Indices = set()
        for gradient in self.gradients:
            own = self.slice([gradient], given=()) & weight
            if not any(self._name(index) in PRODUCTS for index in own):
                light |= own
        made_late: set[int] = set()
        for index in sorted(light):
            eqn = self.graph.equations[index]
            if self._name(index) in COLLECTIVES or not made_late.isdisjoint(map(id, eqn.invars)):
                made_late.update(map(id, eqn.outvars))
                light.remove(index)
        return light

    def _name(self, index: int) -> str:
        return operation(self.graph.equations[index]).primitive.name

    def slice(self, targets: Iterable[Variable], *, given: Iterable[Variable]) -> Indices:
        """Returns the equations that compute the targets from given variables, inputs and constants."""
        found: Indices = set()
        given, pending = set(given), list(targets)
        while pending:
            variable = pending.pop()
            if is_literal(variable) or variable in given or variable not in self.producer:
                continue
            index = self.producer[variable]
            if index not in found:
                found.add(index)
                pending += self.graph.equations[index].invars
        return found

    def _made(self, part: Indices) -> set[Variable]:
        return {out for index in part for out in self.graph.equations[index].outvars} - self.free

    def _used(self, part: Indices, results: list[Variable]) -> set[Variable]:
        equations = (self.graph.equations[index] for index in part)
        used = [*(operand for eqn in equations for operand in eqn.invars), *results]
        return {variable for variable in used if not is_literal(variable) and variable not in self.free}

    def _fewest(self, wanted: set[Variable], given: list[Variable]) -> list[Variable]:
        """Returns the variables to hold for a later part.

        If a variable was only moved or cast from another one that is not larger, the other one is held.

        Args:
            wanted: The variables that the later part uses.
            given: The variables that it has without holding them.
        """
        had = set(given)
        for variable in self.place:
            if self._source(variable) in had:
                had.add(variable)
        wanted = self._without_keys(wanted) - had
        for parent in sorted(self.place, key=self.place.__getitem__, reverse=True):
            children = {child for child in wanted if self._source(child) is parent}
            if children and (parent in wanted or _num_bytes([parent]) <= _num_bytes(children)):
                wanted = (wanted - children) | {parent}
        return sorted(wanted, key=self.place.__getitem__)

    def _source(self, variable: Variable) -> Variable | None:
        """Returns the variable that another one was only moved or cast from, or None."""
        eqn = self._equation(variable)
        if eqn is None or eqn.primitive.name not in MOVES:
            return None
        operands = [operand for operand in eqn.invars if not is_literal(operand) and operand not in self.free]
        return operands[0] if len(operands) == 1 else None

    def _without_keys(self, wanted: set[Variable]) -> set[Variable]:
        """Replaces random keys, which a buffer cannot store, by the variables that they are computed from."""
        keys = {variable for variable in wanted if jnp.issubdtype(variable.aval.dtype, jax.dtypes.prng_key)}
        if not keys:
            return wanted
        equations = [eqn for eqn in map(self._equation, keys) if eqn is not None]
        operands = {operand for eqn in equations for operand in eqn.invars if not is_literal(operand)}
        return self._without_keys((wanted - keys) | (operands - self.free))

    def _equation(self, variable: Variable) -> Equation | None:
        index = self.producer.get(variable)
        return None if index is None else self.graph.equations[index]

    def function(self, inputs: list[Variable], outputs: list[Variable]) -> Callable[..., list[Array]]:
        """Returns a function from values of some variables to others, which runs only the needed equations."""
        indices = sorted(self.slice(outputs, given=inputs))
        return run_equations(self.graph, [self.graph.equations[index] for index in indices], inputs, outputs)


def _num_bytes(variables: Iterable[Variable]) -> int:
    return sum(variable.aval.size * variable.aval.dtype.itemsize for variable in variables)
