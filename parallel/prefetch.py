"""FSDP's blocks with the next one's gather under way: forward and backward over the stack, written out.

    forward    W0 = gather                                         exposed
               for each block n:   W(n+1) = gather                 beside the products of block n
                                   x, kept(n) = block(W(n), x)
    backward   W(N-1) = gather                                     exposed
               for each block n, last to first:
                   W(n-1) = gather                                 beside the products of block n
                   dW(n+1) = reduce-scatter                        beside the products of block n
                   dx, dW(n) = gradient of block n
               dW(0) = reduce-scatter                              exposed

In a plain loop over blocks a gather starts and ends in the turn that needs it, with no product between: the compiler
does not move it across the boundary of a loop. Here the loop carries the next block's whole parameters, so that each
turn's gather has all of the turn to finish. The collectives are those of the plain form: N gathers forward, N backward,
N reduce-scatters of each sharded leaf. Cost: one more gathered block and one more block of whole gradients alive.

What backward keeps is what `cut.py` finds that it needs, without anything made of parameters alone (remat `none`), or
the input of each block, which is then run once more (remat `full`).

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.3.2 (prefetching).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .cut import cut, join_floats, split_floats
from .fsdp import gather, scatter
from .model import Activations, Params, fold_block
from .precision import Precision

PREFETCH_REMAT = ("none", "full")
FEWEST_BLOCKS = 4
"""With fewer, the loops are so short that XLA unrolls them and keeps whole parameters from forward to backward."""

Block = Callable[[Params, Activations, Array | None], Activations]


def check_prefetch(num_blocks: int, remat: str) -> None:
    """Checks what a prefetched stack needs.

    Raises:
        ValueError: There are too few blocks, or the remat policy is another.
    """
    problems = []
    if num_blocks < FEWEST_BLOCKS:
        problems.append(
            f"strategy.fsdp.prefetch=1 needs {FEWEST_BLOCKS} blocks or more, and the model has {num_blocks}: in loops "
            "this short there is nothing to hide behind. Set strategy.fsdp.prefetch to 0, or model.layers higher."
        )
    if remat not in PREFETCH_REMAT:
        problems.append(
            f"train.remat={remat} does not go with strategy.fsdp.prefetch=1: blocks that are gathered ahead keep all "
            f"that backward needs, or their input. Set train.remat to {' or '.join(PREFETCH_REMAT)}, or prefetch to 0."
        )
    if problems:
        raise ValueError("\n".join(problems))


def run_prefetched(
    block: Block,
    shards: Params,
    x: Activations,
    key: Array | None,
    *,
    stored: Any,
    reduced: Any,
    axes: tuple[str, ...],
    precision: Precision,
    remat: str,
) -> Activations:
    """Runs a stack of blocks, each gathered while the one before it runs. Inside `shard_map`.

    Args:
        block: The function of one block, on whole parameters.
        shards: Per-device parameters of all blocks, stacked on dim 0.
        x: Activations that enter the first block.
        key: The key of the step, or None.
        stored: Layouts of one block's parameters.
        reduced: Layouts of its gradients.
        axes: The mesh axes to gather over.
        precision: The compute and reduce dtypes.
        remat: `none` keeps what backward needs, `full` the input of each block.

    Returns:
        Activations that leave the last block; differentiable with respect to `shards` and the floats of `x`.
    """
    num_blocks = len(jax.tree.leaves(shards)[0])
    floats, others = split_floats(x)
    key_data = None if key is None else jax.random.key_data(key)

    def whole(shards: Params, index: Array | int) -> Params:
        return gather(jax.tree.map(lambda leaf: leaf[index], shards), stored, axes, precision)

    def key_of(key_data: Array | None, index: Array | int) -> Array | None:
        return fold_block(None if key_data is None else jax.random.wrap_key_data(key_data), jnp.asarray(index))

    parts = None if remat == "full" else cut(block, whole(shards, 0), x, key_of(key_data, 0))

    def run(params: Params, x: Activations, block_key: Array | None) -> tuple[Activations, Any]:
        return parts.forward(params, x, block_key) if parts else (block(params, x, block_key), x)

    def differentiate(
        params: Params, kept: Any, block_key: Array | None, dy: list[Array]
    ) -> tuple[list[Array], Params]:
        if parts:
            dx, crossing = parts.backward_input(params, block_key, kept, dy)
            return dx, parts.backward_weight(params, block_key, kept, crossing)
        x_floats, x_others = split_floats(kept)

        def again(params: Params, x_floats: list[Array]) -> list[Array]:
            return split_floats(block(params, join_floats(kept, x_floats, x_others), block_key))[0]

        gradients, dx = jax.vjp(again, params, x_floats)[1](dy)
        return dx, gradients

    @jax.custom_vjp
    def stack(shards: Params, floats: list[Array], others: list[Array], key_data: Array | None) -> Activations:
        return forward(shards, floats, others, key_data)[0]

    def forward(shards: Params, floats: list[Array], others: list[Array], key_data: Array | None) -> Any:
        def body(carry: Any, index: Array) -> Any:
            x, params = carry
            following = whole(shards, index + 1)
            x, kept = run(params, x, key_of(key_data, index))
            return (x, following), kept

        shards, floats = lax.optimization_barrier((shards, floats))  # else gathers leave a loop over microbatches
        entering = (join_floats(x, floats, others), whole(shards, 0))
        (leaving, params), kept = lax.scan(body, entering, jnp.arange(num_blocks - 1))
        leaving, last = run(params, leaving, key_of(key_data, num_blocks - 1))
        return leaving, (shards, kept, last, key_data)

    def backward(residuals: Any, gradient: Activations) -> Any:
        shards, kept, last, key_data = residuals
        shards, last = lax.optimization_barrier((shards, last))
        final = num_blocks - 1

        def shard(gradients: Params) -> Params:
            return scatter(gradients, reduced, axes, precision)

        def turn(carry: Any, kept: Any, index: Array | int, earlier: Params | None) -> Any:
            dx, params, later = carry
            scattered = shard(later)
            dx, own = differentiate(params, kept, key_of(key_data, index), dx)
            return (dx, earlier, own), scattered

        dy = [leaf for leaf in jax.tree.leaves(gradient) if leaf.dtype != jax.dtypes.float0]
        dx, own = differentiate(whole(shards, final), last, key_of(key_data, final), dy)
        carry, middle = lax.scan(
            lambda carry, layer: turn(carry, layer[0], layer[1], whole(shards, layer[1] - 1)),
            (dx, whole(shards, final - 1), own),
            (jax.tree.map(lambda leaf: leaf[1:], kept), jnp.arange(1, final)),
            reverse=True,
        )
        (dx, _, own), second = turn(carry, jax.tree.map(lambda leaf: leaf[0], kept), 0, None)
        gradients = [_stacked(shard(own)), _stacked(second), middle]
        return jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *gradients), dx, None, None

    stack.defvjp(forward, backward)
    return stack(shards, floats, others, key_data)


def _stacked(tree: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[None], tree)
