"""Which parameters of a block backward gathers again: read from the block's own traced program.

Backward needs a matrix for the gradient of its product's input. It needs no bias that was only added, and no frozen
matrix where what was made of it is kept. The program of a block, forward and backward, says which: what no result is
made of, XLA leaves out, and so does the count here.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import Array

from ...layouts.paths import leaves_with_paths
from ...mesh.keys import make_key
from ..collectives import Collective, Traffic, wire_bytes
from ..fsdp import gather
from ..model import Activations, BlockModel, Params
from ..plan import ShardingPlan, StepOptions
from ..precision import Precision
from ..xla.graph import Graph, made_of, trace
from ..xla.primitives import GATHERS, gathered_over
from .activations import on_activations
from .differentiable import join_differentiable, split_differentiable
from .forward import block_of_loop
from .gathered_block import block_layouts
from .model_parts import make_parts
from .prefetch import make_stack, prefetches_blocks
from .split_backward import split_block

ALL_TO_ALL = "all-to-all"


class Reads(NamedTuple):
    """Paths of parameters of blocks that backward gathers again.

    Attributes:
        inner: in a block whose input has a gradient.
        first: in the first block of all.
    """

    inner: frozenset[str]
    first: frozenset[str]


def read_again(
    model: BlockModel,
    plan: ShardingPlan,
    microbatch: Mapping[str, jax.ShapeDtypeStruct],
    remat: str,
    precision: Precision,
) -> Reads:
    """The parameters that backward gathers again, block by block.

    Args:
        model: The model, split over the axes inside it.
        plan: Where its parameters live; it gathers blocks, and does not keep them.
        microbatch: Per-device shapes of one microbatch.
        remat: What blocks keep for backward.
        precision: The dtypes.
    """

    def look(params: Params, x: Activations) -> Reads:
        shards, key = jax.tree.map(lambda leaf: leaf[0], params["blocks"]), make_key(0)
        split = partial(_split_blocks, plan)
        if plan.pipeline:
            block = make_parts(model, plan, remat=remat, precision=precision).block
            inner = _of_split(block, split, shards, x, key, plan.gather_axes)
            return Reads(inner, inner)
        if prefetches_blocks(plan):
            inner = _of_prefetched(model, plan, params["blocks"], x, remat, precision)
            return Reads(inner, inner)
        block, unroll = block_of_loop(model, plan, remat, precision)
        run = partial(_of_loop, lambda shards, kept, x: block(x, shards, kept, key), split, shards, x, plan.gather_axes)
        inner = run(to_input=True)
        ends_here = unroll == model.num_blocks and _is_frozen(model.embed_reads, plan)
        return Reads(inner, run(to_input=False) if ends_here else inner)

    return on_activations(look, model, plan, microbatch, precision)


def all_to_alls_again(
    model: BlockModel,
    plan: ShardingPlan,
    microbatch: Mapping[str, jax.ShapeDtypeStruct],
    options: StepOptions,
    moved: Traffic,
    platform: str,
) -> tuple[Collective, ...]:
    """Returns the lines of `moved.again` without the all-to-alls whose result no gradient needs.

    Where products of matrices are kept, the way back of attention's heads is made again for the gradient of the matrix
    behind it alone, which a frozen matrix does not have.

    Args:
        model: The model, split over the axes inside it.
        plan: Where its parameters live; without a pipeline.
        microbatch: Per-device shapes of one microbatch.
        options: The remat policy and the dtypes.
        moved: What one block moves.
        platform: Where the step runs.
    """

    def look(params: Params, x: Activations) -> list[Counter[int]]:
        shards = jax.tree.map(lambda leaf: leaf[0], params["blocks"])
        block, _ = block_of_loop(model, plan, options.remat, options.precision)
        split = partial(_split_blocks, plan)
        alone, both, differentiable = _passes(lambda shards, kept, x: block(x, shards, kept, make_key(0)), split, x)
        once, twice = trace(alone, shards, differentiable), trace(both, shards, differentiable, differentiable)
        return [_all_to_alls(graph, platform) for graph, _ in (once, twice)]

    once, twice = on_activations(look, model, plan, microbatch, options.precision)
    if once != _lines(moved.forward):  # the model moves other arrays than it tells
        return moved.again
    needed, kept = twice - once - _lines(moved.backward), []
    for line in moved.again:
        if line.kind != ALL_TO_ALL or needed[line.bytes]:
            needed[line.bytes] -= 1
            kept.append(line)
    return tuple(kept)


def _lines(lines: Iterable[Collective]) -> Counter[int]:
    return Counter(line.bytes for line in lines if line.kind == ALL_TO_ALL)


def _all_to_alls(graph: Graph, platform: str) -> Counter[int]:
    """The bytes of the all-to-alls that the results of a graph are made of."""
    arrays = (eqn.invars[0].aval for eqn in made_of(graph, graph.outputs)[0] if eqn.primitive.name == "all_to_all")
    return Counter(array.size * wire_bytes(array.dtype, platform) for array in arrays)


def _is_frozen(groups: Collection[str], plan: ShardingPlan) -> bool:
    return plan.frozen.issuperset(row.path for row in plan.table.rows if row.path.split("/")[0] in groups)


_Split: TypeAlias = Callable[[Params], tuple[Params, Params]]
"""Takes parameters of blocks apart: those that are frozen, and those that train."""


def _split_blocks(plan: ShardingPlan, blocks: Params) -> tuple[Params, Params]:
    frozen, trained = plan.split_frozen({"blocks": blocks})
    return frozen["blocks"], trained["blocks"]


def _of_loop(
    block: Callable[[Params, Params, Activations], Activations],
    split: _Split,
    shards: Params,
    x: Activations,
    axes: tuple[str, ...],
    *,
    to_input: bool,
) -> frozenset[str]:
    """What forward and backward together gather more often than forward alone."""
    alone, both, differentiable = _passes(block, split, x, to_input=to_input)
    once = _gathers(alone, shards, differentiable, axes=axes)
    twice = _gathers(both, shards, differentiable, differentiable, axes=axes)
    return frozenset(path for path in twice if twice[path] > once[path])


def _passes(
    block: Callable[[Params, Params, Activations], Activations], split: _Split, x: Activations, *, to_input: bool = True
) -> tuple[Callable[..., Any], Callable[..., Any], list[Array]]:
    """Forward alone, forward and backward together, and the arrays of `x` that they are functions of."""
    differentiable, others = split_differentiable(x)

    def pulled(shards: Params, differentiable: list[Array]) -> Any:
        frozen, trained = split(shards)

        def forward(trained: Params, differentiable: list[Array]) -> list[Array]:
            return split_differentiable(block(trained, frozen, join_differentiable(x, differentiable, others)))[0]

        return jax.vjp(forward, trained, differentiable)

    def alone(shards: Params, differentiable: list[Array]) -> list[Array]:
        return pulled(shards, differentiable)[0]  # gradients of its own are calls that hide what is inside

    def both(shards: Params, differentiable: list[Array], dy: list[Array]) -> Any:
        y, pull = pulled(shards, differentiable)
        gradients, dx = pull(dy)
        return y, gradients, dx if to_input else ()

    return alone, both, differentiable


def _of_split(
    block: Callable[[Params, Params, Activations, Array], Activations],
    split: _Split,
    shards: Params,
    x: Activations,
    key: Array,
    axes: tuple[str, ...],
) -> frozenset[str]:
    """What backward to the input gathers, where a stage runs it in a tick of its own."""
    frozen, trained = split(shards)
    parts = split_block(lambda shards, x, rest: block(shards, rest[0], x, rest[1]), trained, x, (frozen, key))

    def backward(shards: Params, residuals: Any, dy: list[Array]) -> Any:
        frozen, trained = split(shards)
        return parts.backward_input(trained, (frozen, key), residuals, dy)

    return frozenset(_gathers(backward, shards, parts.residuals, split_differentiable(x)[0], axes=axes))


def _of_prefetched(
    model: BlockModel, plan: ShardingPlan, blocks: Params, x: Activations, remat: str, precision: Precision
) -> frozenset[str]:
    """What backward reads of a block's whole parameters, where they are gathered ahead of it."""
    stored, reduced = block_layouts(plan)
    options: Any = {"axes": plan.gather_axes, "precision": precision}
    key = make_key(0)
    frozen, trained = _split_blocks(plan, blocks)
    stack = make_stack(
        model.block,
        (trained, frozen),
        x,
        jax.random.key_data(key),
        remat=remat,
        stored=stored,
        reduced=reduced,
        **options,
    )

    def backward(shards: Params, kept: Any, dy: list[Array]) -> Any:
        whole = stack.split(gather(shards, stored, **options), like=(trained, frozen))
        return stack.differentiate(whole, kept, key, dy)

    one, kept = jax.tree.map(lambda leaf: leaf[0], blocks), stack.parts.residuals if stack.parts else x
    return frozenset(_gathers(backward, one, kept, split_differentiable(x)[0], axes=plan.gather_axes))


def _gathers(function: Callable[..., Any], shards: Params, *rest: Any, axes: tuple[str, ...]) -> Counter[str]:
    """How often the program of a function gathers each of the parameters, where a result is made of it."""
    graph, _ = trace(function, shards, *rest)
    paths = [f"blocks/{path}" for path, _ in leaves_with_paths(shards)]
    found: Counter[str] = Counter()
    for eqn in made_of(graph, graph.outputs)[0]:
        if eqn.primitive.name in GATHERS and gathered_over(eqn.params) <= set(axes):
            sources = made_of(graph, eqn.invars)[1]
            found.update(path for path, variable in zip(paths, graph.inputs, strict=False) if variable in sources)
    return found
