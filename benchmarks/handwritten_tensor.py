"""Tensor parallelism (and FSDP x tensor) as an expert writes it by hand in plain JAX, in two ways.

Megatron's layouts in both: columns of query, key, value, gate and up, rows of out and down, and the vocabulary are
split over `tensor`; between products every device keeps its own positions.

`by_jit`: `jit`, NamedShardings and `with_sharding_constraint` at each change of layout; XLA partitions.
`by_shard_map`: all_gather and psum_scatter along the positions, and the loss from logits split over the vocabulary.

Letters as in models/transformer.py. The arithmetic (norm, rotation, attention) is the model's; nothing of parallel/.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from handwritten import HandWritten, P, drop_gathered, first_state, gather, jit_of, make_mesh, shard_map_of
from jax import lax
from jax.sharding import Mesh, NamedSharding
from spmdkit.models.attention import causal_attention, rotate
from spmdkit.models.layers import cross_entropy, recompute, rms_norm
from spmdkit.models.transformer import TransformerConfig, transformer

ROWS = ("data", "fsdp")
COLUMNS = ("query", "key", "value", "gate", "up")


class Moves(NamedTuple):
    """How the block changes layouts; the arithmetic between is the same in both ways.

    Attributes:
        whole: (B, l, D), own positions, to (B, L, D).
        columns: (B, L, f), what a column-parallel product gives.
        own: (B, L, D), partial sums, to (B, l, D).
    """

    whole: Any
    columns: Any
    own: Any


def shardings(params: Any, mesh: Mesh) -> Any:
    """Megatron's split over tensor, and FSDP's on the first dim of one block, whose parts lie together in memory."""
    shards = ("fsdp",) if mesh.shape["fsdp"] > 1 else ()

    def spec(path: Any, leaf: Any) -> NamedSharding:
        name = path[-1].key
        axes = {
            "tokens": (("tensor", *shards),),
            "logits": (shards, "tensor"),
            **dict.fromkeys(COLUMNS, (None, shards, "tensor")),
            **dict.fromkeys(("out", "down"), (None, ("tensor", *shards))),
        }
        return NamedSharding(mesh, P(*axes.get(name, ())))

    return jax.tree_util.tree_map_with_path(spec, params)


def block(config: TransformerConfig, moves: Moves, x_BlD: Any, params: Any) -> Any:
    """One block: a gather before each half, a scatter after it."""
    attention, mlp = params["attention"], params["mlp"]
    h_BLD = moves.whole(rms_norm(x_BlD, attention["norm"], config.norm_epsilon))
    query, key, value = (moves.columns(h_BLD @ attention[name]) for name in ("query", "key", "value"))
    query, key, value = (each.reshape(*each.shape[:2], -1, config.head_size) for each in (query, key, value))
    mixed = causal_attention(rotate(query, config.rope_base), rotate(key, config.rope_base), value)
    x_BlD = x_BlD + moves.own(moves.columns(mixed.reshape(*mixed.shape[:2], -1)) @ attention["out"])
    h_BLD = moves.whole(rms_norm(x_BlD, mlp["norm"], config.norm_epsilon))
    gate, up = (moves.columns(h_BLD @ mlp[name]) for name in ("gate", "up"))
    return x_BlD + moves.own(_swiglu(gate, up) @ mlp["down"])


@recompute
def _swiglu(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


def by_jit(config: TransformerConfig, optimizer: Any, **sizes: int) -> HandWritten:
    """XLA partitions, told the layout of every activation."""
    model, mesh = transformer(config), _mesh(sizes)
    state, layouts = first_state(model, optimizer, mesh, shardings)

    def as_(*axes: Any) -> Any:
        return lambda value: lax.with_sharding_constraint(value, NamedSharding(mesh, P(ROWS, *axes)))

    moves = Moves(whole=as_(None, None), columns=as_(None, "tensor"), own=as_("tensor", None))

    def unsplit(shards: Any, tree: Any, skip: int) -> Any:
        """FSDP's gather: the same layout without fsdp."""

        def whole(leaf: Any, sharding: NamedSharding) -> Any:
            axes = ["tensor" if entry and "tensor" in entry else None for entry in sharding.spec[skip:]]
            return lax.with_sharding_constraint(leaf, NamedSharding(mesh, P(*axes)))

        return jax.tree.map(whole, shards, tree) if mesh.shape["fsdp"] > 1 else shards

    def loss(params: Any, batch: Any) -> Any:
        outer = {name: unsplit(params[name], layouts[0][name], 0) for name in ("embed", "head")}
        table_VD = outer["embed"]["tokens"]
        x_BlD = moves.own(jnp.take(table_VD, batch["inputs"], axis=0))

        def body(x_BlD: Any, shards: Any) -> Any:
            return block(config, moves, x_BlD, unsplit(shards, layouts[0]["blocks"], 1)), None

        x_BlD, _ = lax.scan(body, x_BlD, params["blocks"])
        normed_BLD = moves.whole(rms_norm(x_BlD, outer["head"]["norm"], config.norm_epsilon))
        logits_BLV = moves.columns(normed_BLD @ (table_VD.T if config.tied else outer["head"]["logits"]))
        return cross_entropy(logits_BLV, batch["targets"], batch["weights"])

    return HandWritten(jit_of(loss, optimizer, mesh, layouts), state, NamedSharding(mesh, P(ROWS)))


def by_shard_map(config: TransformerConfig, optimizer: Any, **sizes: int) -> HandWritten:
    """The collectives by hand."""
    model, mesh = transformer(config), _mesh(sizes)
    state, layouts = first_state(model, optimizer, mesh, shardings)
    specs = jax.tree.map(lambda sharding: sharding.spec, layouts[0])
    moves = Moves(
        whole=lambda x_BlD: lax.all_gather(x_BlD, "tensor", axis=1, tiled=True),
        columns=lambda h_BLf: h_BLf,
        own=lambda x_BLD: lax.psum_scatter(x_BLD, "tensor", scatter_dimension=1, tiled=True),
    )

    def unsplit(shards: Any, tree: Any, skip: int) -> Any:
        return jax.tree.map(partial(gather, skip=skip), shards, tree) if mesh.shape["fsdp"] > 1 else shards

    def loss(params: Any, batch: Any) -> Any:
        outer = {name: unsplit(params[name], specs[name], 0) for name in ("embed", "head")}
        table_vD = outer["embed"]["tokens"]

        def body(x_BlD: Any, shards: Any) -> Any:
            return block(config, moves, x_BlD, unsplit(shards, specs["blocks"], 1))

        if mesh.shape["fsdp"] > 1:
            body = jax.checkpoint(body, policy=drop_gathered, prevent_cse=False)
        x_BlD = moves.own(_look_up(table_vD, batch["inputs"]))
        x_BlD, _ = lax.scan(lambda x_BlD, shards: (body(x_BlD, shards), None), x_BlD, params["blocks"])
        normed_BLD = moves.whole(rms_norm(x_BlD, outer["head"]["norm"], config.norm_epsilon))
        logits_BLv = normed_BLD @ (table_vD.T if config.tied else outer["head"]["logits"])
        return _split_cross_entropy(logits_BLv, batch["targets"], batch["weights"])

    return HandWritten(shard_map_of(loss, optimizer, mesh, layouts), state, NamedSharding(mesh, P(ROWS)))


def _look_up(table_vD: Any, tokens_BL: Any) -> Any:
    """Rows of the tokens in this device's part of the vocabulary, zeros for the others: summed by a scatter."""
    row_BL = tokens_BL - lax.axis_index("tensor") * table_vD.shape[0]
    held_BL = (row_BL >= 0) & (row_BL < table_vD.shape[0])
    return jnp.where(held_BL[..., None], jnp.take(table_vD, jnp.where(held_BL, row_BL, 0), axis=0), 0.0)


def _split_cross_entropy(logits_BLv: Any, targets_BL: Any, weights_BL: Any) -> Any:
    """As Megatron has it, with its last two all-reduces in one: every device along tensor then has the whole loss."""
    largest_BL = lax.pmax(lax.stop_gradient(jnp.max(logits_BLv, axis=-1)), "tensor")
    shifted_BLv = logits_BLv - largest_BL[..., None]
    first = lax.axis_index("tensor") * logits_BLv.shape[2]
    is_target_BLv = lax.broadcasted_iota(jnp.int32, logits_BLv.shape, 2) + first == targets_BL[..., None]
    sums_BL = jnp.sum(jnp.exp(shifted_BLv), axis=-1)
    target_BL = jnp.sum(jnp.where(is_target_BLv, shifted_BLv, 0.0), axis=-1)
    sums_BL, target_BL = lax.psum((sums_BL, target_BL), "tensor")
    return jnp.sum((jnp.log(sums_BL) - target_BL) * weights_BL), jnp.sum(weights_BL)


def _mesh(sizes: dict[str, int]) -> Mesh:
    return make_mesh(**{"data": 1, "fsdp": 1, "tensor": 1, **sizes})
