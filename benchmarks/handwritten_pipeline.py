"""GPipe as an expert writes it by hand in plain JAX: one `lax.scan` over ticks, autodiff makes the backward.

The blocks live along `pipe`, rows are split over `data`. At tick t stage s runs microbatch t - s and passes the result
on by a ppermute. The first stage embeds a microbatch when its turn comes, the last takes its loss at once, so that
nothing is collected; each in a `lax.cond`, so that the other stages do not compute it too.

Three forms, since they trade time for memory, and stages that idle cost time only where devices share processors:

    gpipe              idle stages compute on whatever they have, backward keeps everything; the head is recomputed
    gpipe_skip         the same, but idle stages skip their blocks in a `lax.cond`
    gpipe_checkpoint   `gpipe_skip` in a `jax.checkpoint`: of each tick backward keeps what came in alone

The arithmetic (embed, block, head) is the model's; nothing of parallel/.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from handwritten import HandWritten, P, first_state, make_mesh, shard_map_of, vary
from jax import lax
from jax.sharding import Mesh, NamedSharding
from spmdkit.models.transformer import TransformerConfig, transformer


def gpipe(
    config: TransformerConfig,
    optimizer: Any,
    *,
    microbatches: int = 8,
    skip: bool = False,
    checkpoint: bool = False,
    **sizes: int,
) -> HandWritten:
    """The step, its first state and the layout of its batch."""
    model, mesh = transformer(config), make_mesh(**{"pipe": 1, "data": 1, **sizes})
    state, layouts = first_state(model, optimizer, mesh, shardings)
    loss = partial(pipelined_loss, model, mesh, microbatches, skip, checkpoint)
    step = shard_map_of(loss, optimizer, mesh, layouts, rows=("data",))
    return HandWritten(step, state, NamedSharding(mesh, P("data")))


gpipe_skip = partial(gpipe, skip=True)
gpipe_checkpoint = partial(gpipe, skip=True, checkpoint=True)


def shardings(params: Any, mesh: Mesh) -> Any:
    """Blocks along pipe, embedding and head on every stage."""

    def spec(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, P("pipe") if path[0].key == "blocks" else P())

    return jax.tree_util.tree_map_with_path(spec, params)


def pipelined_loss(
    model: Any, mesh: Mesh, microbatches: int, skip: bool, checkpoint: bool, params: Any, batch: Any
) -> Any:
    """The (sum of losses, sum of weights) of one device: 0 but on the last stage."""
    stage, last = lax.axis_index("pipe"), mesh.shape["pipe"] - 1
    varying = vary(tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1))
    pieces = {name: rows.reshape(microbatches, -1, *rows.shape[1:]) for name, rows in batch.items()}
    outer = {name: params[name] for name in ("embed", "head")}
    none = varying(jnp.zeros(())), varying(jnp.zeros(()))

    def blocks(x: Any) -> Any:
        return lax.scan(lambda x, block: (model.block(block, x, None), None), x, params["blocks"])[0]

    @jax.checkpoint  # logits are cheap to make and large to keep
    def head(outer: Any, x: Any, piece: Any) -> Any:
        return tuple(map(varying, model.head(outer, x, piece, None)))

    def tick(x: Any, number: Any) -> Any:
        microbatch = number - stage
        runs = (microbatch >= 0) & (microbatch < microbatches)
        index = jnp.clip(microbatch, 0, microbatches - 1)
        piece = {name: lax.dynamic_index_in_dim(rows, index, keepdims=False) for name, rows in pieces.items()}
        x = lax.cond(stage == 0, lambda x: model.embed(outer, piece, None), lambda x: x, x)
        x = lax.cond(runs, blocks, lambda x: x, x) if skip else blocks(x)
        sums = lax.cond(runs & (stage == last), lambda x: head(outer, x, piece), lambda x: none, x)
        return lax.ppermute(x, "pipe", [(s, s + 1) for s in range(last)]), sums

    rows, length = pieces["inputs"].shape[1:]
    start = {"hidden": varying(jnp.zeros((rows, length, params["embed"]["tokens"].shape[1])))}
    body = jax.checkpoint(tick, prevent_cse=False) if checkpoint else tick
    _, (totals, weights) = lax.scan(body, start, jnp.arange(microbatches + last))
    return jnp.sum(totals), jnp.sum(weights)
