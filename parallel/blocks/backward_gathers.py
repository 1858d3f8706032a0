"""The parameters that a block's backward gathers again, and a split model's collectives in it, from its traced program.

Backward needs a matrix to compute the gradient of the product's input. It does not need a bias that was only added, or
a frozen matrix if the value computed from it is kept. The traced forward and backward of a block show which parameters
are needed: like XLA, the count here ignores operations that no result depends on.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import Array

from ...layouts.paths import leaves_with_paths
from ...mesh.keys import make_key
from ..collectives import Collective, merge, subtract
from ..model import AbstractBatch, Activations, BlockModel, Params, join_differentiable, split_differentiable
from ..plan import ShardingPlan
from ..xla.graph import dependencies, operation, trace
from ..xla.platform import uses
from ..xla.primitives import GATHERS, gathered_over
from ..xla.traced_sums import other_collectives
from .ends import separates_ends
from .forward import block_of_loop, first_block
from .model_parts import make_parts, on_activations
from .prefetch import make_stack, prefetches_blocks
from .split_backward import split_block

ALL_REDUCE = "all-reduce"


def find_backward_gathers(
    model: BlockModel, plan: ShardingPlan, microbatch: AbstractBatch
) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the paths of the parameters of blocks that backward gathers again.

    The first set is of a block with an input that has a gradient, the second one of the first block.

    Args:
        model: The model, split over the axes inside it.
        plan: A plan that gathers blocks and does not keep them, with the options of the step.
        microbatch: The per-device shapes of one microbatch.
    """

    def find(params: Params, x: Activations) -> tuple[frozenset[str], frozenset[str]]:
        if prefetches_blocks(plan):
            inner = _of_prefetched(model, plan, params["blocks"], x)
            return inner, inner
        one = first_block(plan, params)
        key = make_key(0)
        if plan.pipeline:
            inner = _of_split(make_parts(model, plan).block, plan, one, x, key)
            return inner, inner
        block, unroll = block_of_loop(model, plan)
        run = partial(_of_loop, lambda shards, kept, x: block(x, shards, kept, key), plan, one, x)
        inner = run(to_input=True)
        return inner, run(to_input=False) if _first_ends_backward(model, plan, unroll) else inner

    return on_activations(find, model, plan, microbatch)


class BackwardCollectives(NamedTuple):
    """The collectives that a split model asks for in the backward pass of a block, without all-reduces.

    Attributes:
        inner: Those of a block with an input that has a gradient.
        first: Those of the first block.
    """

    inner: tuple[Collective, ...]
    first: tuple[Collective, ...]


def find_backward_collectives(
    model: BlockModel, plan: ShardingPlan, microbatch: AbstractBatch, forward: Iterable[Collective], platform: str
) -> BackwardCollectives | None:
    """Returns the collectives of a block's backward pass, with those that it repeats, that some gradient needs.

    A frozen matrix has no gradient, so what only its gradient needs is neither gathered nor recomputed: for example,
    the all-to-all that brings attention heads back, or the second half of a block of which nothing trains.

    Args:
        model: The model, split over the axes inside it.
        plan: A plan without a pipeline, with the options of the step.
        microbatch: The per-device shapes of one microbatch.
        forward: The collectives of the forward pass, by the model's `traffic`.
        platform: The platform of the step.

    Returns:
        The collectives; None if the model's `traffic` does not describe the program of its forward pass.
    """
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))

    def read(function: Callable[..., Any], *arguments: Any) -> tuple[Collective, ...]:
        graph, _ = trace(function, *arguments)
        return merge(other_collectives(graph, sizes=sizes, platform=platform))

    def find(params: Params, x: Activations) -> tuple[tuple[Collective, ...], ...]:
        one = first_block(plan, params)
        block, unroll = block_of_loop(model, plan)

        def run(shards: Params, kept: Params, x: Activations) -> Activations:
            return block(x, shards, kept, make_key(0))

        alone, both, differentiable = _passes(run, x)
        _, both_of_first, _ = _passes(run, x, to_input=not _first_ends_backward(model, plan, unroll))
        arguments = one, differentiable, differentiable
        return read(alone, one, differentiable), read(both, *arguments), read(both_of_first, *arguments)

    traced, inner, first = on_activations(find, model, plan, microbatch)
    if traced != merge(line for line in forward if line.kind != ALL_REDUCE):
        return None
    return BackwardCollectives(subtract(inner, traced), subtract(first, traced))


def _first_ends_backward(model: BlockModel, plan: ShardingPlan, unroll: int) -> bool:
    """Returns whether XLA compiles the first block apart from the others, and nothing needs its input's gradient.

    If the ends are separate, collectives of simulated devices wait for that gradient.
    """
    if not _is_frozen(model.embed_reads, plan):
        return False
    if separates_ends(model, plan):
        return not uses("order", plan.platform)
    return unroll == model.num_blocks


def _is_frozen(groups: Collection[str], plan: ShardingPlan) -> bool:
    return plan.frozen.issuperset(row.path for row in plan.table.rows if row.path.split("/")[0] in groups)


_Block: TypeAlias = Callable[[Params, Params, Activations], Activations]
"""A block as a function of the shards that it is differentiated with respect to, of what is kept, and of its input."""
_OneBlock: TypeAlias = tuple[Params, Params]
"""The first two arguments of a block, see `first_block`."""


def _of_loop(block: _Block, plan: ShardingPlan, one: _OneBlock, x: Activations, *, to_input: bool) -> frozenset[str]:
    """Returns the parameters that forward and backward together gather more often than forward alone."""
    alone, both, differentiable = _passes(block, x, to_input=to_input)
    once = _gathers(alone, plan, one, differentiable)
    twice = _gathers(both, plan, one, differentiable, differentiable)
    return frozenset(path for path in twice if twice[path] > once[path])


def _passes(
    block: _Block, x: Activations, *, to_input: bool = True
) -> tuple[Callable[..., Any], Callable[..., Any], list[Array]]:
    """Returns two functions, forward alone and forward with backward, and the arrays of `x` that they take."""
    differentiable, others = split_differentiable(x)

    def differentiate(one: _OneBlock, differentiable: list[Array]) -> Any:
        shards, kept = one

        def forward(shards: Params, differentiable: list[Array]) -> list[Array]:
            return split_differentiable(block(shards, kept, join_differentiable(x, differentiable, others)))[0]

        return jax.vjp(forward, shards, differentiable)

    def alone(one: _OneBlock, differentiable: list[Array]) -> list[Array]:
        return differentiate(one, differentiable)[0]  # traced by vjp too: custom gradients would hide their insides

    def both(one: _OneBlock, differentiable: list[Array], dy: list[Array]) -> Any:
        y, pull = differentiate(one, differentiable)
        gradients, dx = pull(dy)
        return y, gradients, dx if to_input else ()

    return alone, both, differentiable


def _of_split(
    block: Callable[..., Activations], plan: ShardingPlan, one: _OneBlock, x: Activations, key: Array
) -> frozenset[str]:
    """Returns the parameters that backward to the input gathers if a stage runs it in a separate tick."""
    shards, kept = one
    parts = split_block(lambda shards, x, rest: block(shards, rest[0], x, rest[1]), shards, x, (kept, key))

    def backward(one: _OneBlock, residuals: Any, dy: list[Array]) -> Any:
        shards, kept = one
        return parts.backward_input(shards, (kept, key), residuals, dy)

    return frozenset(_gathers(backward, plan, one, parts.residuals, split_differentiable(x)[0]))


def _of_prefetched(model: BlockModel, plan: ShardingPlan, blocks: Params, x: Activations) -> frozenset[str]:
    """Returns the whole parameters of a block that backward reads if blocks are gathered in advance."""
    key = make_key(0)
    frozen, trained = plan.split_frozen({"blocks": blocks})
    frozen = frozen["blocks"]
    trained = trained["blocks"]
    stack = make_stack(model, plan, (trained, frozen), x, jax.random.key_data(key))

    def backward(shards: Params, kept: Any, dy: list[Array]) -> Any:
        return stack.differentiate(stack.gather_one(shards, like=(trained, frozen)), kept, key, dy)

    one = jax.tree.map(lambda leaf: leaf[0], blocks)
    kept = stack.parts.residuals if stack.parts else x
    return frozenset(_gathers(backward, plan, one, kept, split_differentiable(x)[0]))


def _gathers(function: Callable[..., Any], plan: ShardingPlan, shards: Params | _OneBlock, *rest: Any) -> Counter[str]:
    """Counts the gathers of each parameter that the results of a function depend on.

    Args:
        function: A function of `shards` and the rest.
        plan: A plan that gathers blocks and does not keep them.
        shards: The shards of one block; or trained and frozen ones, each with None in place of the others.
        *rest: The other arguments.
    """
    graph, _ = trace(function, shards, *rest)
    parts = shards if isinstance(shards, tuple) else (shards,)
    paths = [f"blocks/{path}" for part in parts for path, _ in leaves_with_paths(part)]
    found: Counter[str] = Counter()
    for eqn in dependencies(graph, graph.outputs)[0]:
        collective = operation(eqn)
        if collective.primitive.name in GATHERS and gathered_over(collective.params) <= set(plan.gather_axes):
            sources = dependencies(graph, eqn.invars)[1]
            found.update(path for path, variable in zip(paths, graph.inputs, strict=False) if variable in sources)
    return found
