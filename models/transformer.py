"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU; embed / block / head.

Letters: B rows, L positions, V vocabulary, N layers, D width, F width of the MLP, H query heads, G key-value heads,
K width of a head; small letters are one device's part: l positions, f columns of the MLP, h and g heads, v of the
vocabulary. Shapes of the parameters (rules address them by these paths):

    embed/tokens            (V, D)
    blocks/attention/norm   (N, D)          blocks/mlp/norm   (N, D)
    blocks/attention/query  (N, D, H * K)   blocks/mlp/gate   (N, D, F)
    blocks/attention/key    (N, D, G * K)   blocks/mlp/up     (N, D, F)
    blocks/attention/value  (N, D, G * K)   blocks/mlp/down   (N, F, D)
    blocks/attention/out    (N, H * K, D)
    head/norm               (D,)
    head/logits             (D, V)          absent with tied embeddings: the head then reads embed/tokens

Where the config asks for them:

    embed/positions                    (P, D)       learned positions; P rows of them
    blocks/attention/(query|key)_norm  (N, K)       norms of heads
    blocks/attention/query_bias        (N, H * K)   and (key|value)_bias (N, G * K), out_bias (N, D)
    blocks/mlp/(gate|up)_bias          (N, F)       and down_bias (N, D); there is no gate with GELU
    .../norm_bias                      as norm      beside every norm that is a LayerNorm

Activations that rules may lay out, by name: embed/output, blocks/attention/output and blocks/mlp/output (B, L, D), and
head/output (B, L, V), the logits.

With the defaults this is LLaMA's arrangement; with others Qwen's or GPT-2's (`hugging_face/`). Parameters arrive in
the compute dtype. Norms, rotations, softmax and the loss are computed in float32 or wider.

Every function takes the parallel context, `parallel`, as an argument. With the default it is plain JAX on one device.
Otherwise each device holds the parts of the parameters that `rules` says, keeps its own positions between products, and
gathers and scatters them around each (`parallel/tensor.py`, `parallel/context.py`).

Sources: Vaswani et al. 2017, "Attention Is All You Need"; Touvron et al. 2023, "LLaMA" (this arrangement of it);
Shazeer 2020, "GLU Variants Improve Transformer" (SwiGLU).
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..mesh.errors import UserError
from ..parallel import expert, tensor
from ..parallel.blocks.attention.ring import ring_attention
from ..parallel.blocks.attention.ulysses import ulysses_attention
from ..parallel.model import Batch, BlockModel, ParallelContext, Params
from ..parallel.sharding.named_outputs import name_output
from ..parallel.sharding.parallel_context import held_positions, own_positions
from ..parallel.xla.product import weight_first
from .layers.attention import Slowing, causal_attention, rotate
from .layers.biases import add_biases
from .layers.cross_entropy import cross_entropy
from .layers.dropout import dropout
from .layers.norms import head_norm, norm
from .recompute import recompute
from .transformer_config import TransformerConfig
from .transformer_params import init, inward
from .transformer_split import split_problems, split_rules, traffic

Hidden = dict[str, Array]
"""What flows from block to block: "hidden" (B, l, D); where there is dropout "example" (B,), and for packed documents
"segments" (B, L) and "positions" (B, L) in their document, of whole rows."""

Half: TypeAlias = Callable[[Any, ParallelContext, Params, Array, Hidden], tuple[Array, Hidden]]
"""Half of a block: `half(config, parallel, params, normed (B, l, D), x) -> (change of the residual stream, x)`."""

WHOLE = ParallelContext()
"""Nothing is split: one device."""


def transformer(config: TransformerConfig, parallel: ParallelContext = WHOLE) -> BlockModel:
    """Builds the model.

    Args:
        config: Its sizes and choices, with vocabulary and length.
        parallel: The parallel context: how the work is split over the mesh. The default keeps it whole.

    Returns:
        A language model over batches {"inputs", "targets", "weights", "example"} and, for packed documents, "segments"
        and "positions"; `predict` gives logits (B, L, V).

    Raises:
        UserError: The vocabulary or the length is still 0, or the sizes cannot be split so.
    """
    unknown = [name for name in ("vocabulary", "length") if not getattr(config, name)]
    if unknown:
        raise UserError(
            "\n".join(f"model.{name} is not given, and the data does not tell it either." for name in unknown)
        )
    problems = [*split_problems(config, parallel), *expert.size_problems(parallel.expert, experts=0)]
    if problems:
        raise UserError("\n".join(problems))
    bind = functools.partial
    return BlockModel(
        init=bind(init, config),
        embed=bind(embed, config, parallel),
        block=bind(block, config, parallel),
        head=bind(head, config, parallel),
        num_blocks=config.layers,
        head_reads=("embed", "head") if config.tied else ("head",),
        scan_unroll=config.scan_unroll,
        predict=bind(predict, config),
        name="transformer",
        flops_per_row=config.flops_per_row,
        flops_of_length=config.flops_of_length,
        parallelize=bind(transformer, config),
        rules=split_rules(config, parallel),
        traffic=bind(traffic, config, parallel) if parallel.splits_positions else None,
    )


def embed(
    config: TransformerConfig, parallel: ParallelContext, groups: dict[str, Params], batch: Batch, key: Array | None
) -> Hidden:
    """Looks up the tokens; one outside the vocabulary, or a position outside its table, gives NaN and nothing else."""
    tokens_BL = _held(parallel, batch["inputs"])
    hidden_BlD = tensor.embed_tokens(parallel.tensor, groups["embed"]["tokens"], tokens_BL)
    if config.positions == "learned":
        hidden_BlD += _learned_positions(parallel, groups["embed"]["positions"], batch)
    hidden_BlD = name_output(hidden_BlD, "embed/output")
    x = {"hidden": hidden_BlD, **{name: batch[name] for name in ("segments", "positions") if name in batch}}
    if key is None or not config.dropout:
        return x
    x = {**x, "example": batch["example"]}
    return {**x, "hidden": _dropout(config, parallel, hidden_BlD, x, key, "embed")}


def block(
    config: TransformerConfig,
    parallel: ParallelContext,
    params: Params,
    x: Hidden,
    key: Array | None,
    *,
    mlp: Half | None = None,
) -> Hidden:
    """Adds attention, then the MLP (or `mlp` in its place), to the residual stream."""
    for name, half in (("attention", _attention), ("mlp", mlp or _mlp)):
        normed_BlD = norm(config, x["hidden"], params[name])
        change_BlD, x = half(config, parallel, params[name], normed_BlD, x)
        change_BlD = name_output(change_BlD, f"blocks/{name}/output")
        x = {**x, "hidden": x["hidden"] + _dropout(config, parallel, change_BlD, x, key, name)}
    return x


def _attention(
    config: TransformerConfig, parallel: ParallelContext, params: Params, x_BlD: Array, x: Hidden
) -> tuple[Array, Hidden]:
    split = parallel.tensor
    key, value = (
        tensor.own_key_value_weight(split, params[name], config.heads, config.num_kv_heads) for name in ("key", "value")
    )
    products = tensor.gather_products(split, x_BlD, [params["query"], key, value])
    if config.attention_bias != "none":
        products = add_biases(products, _own_biases(config, parallel, params))
    query_BLhK, key_BLgK, value_BLgK = (
        product.reshape(*product.shape[:2], -1, config.head_size) for product in products
    )
    if config.head_norm:
        query_BLhK = head_norm(query_BLhK, params["query_norm"], config.norm_epsilon)
        key_BLgK = head_norm(key_BLgK, params["key_norm"], config.norm_epsilon)
    if config.positions == "rotary":
        position, slowing = _rotary_positions(config, parallel, x), _slowing(config)
        query_BLhK, key_BLgK = (rotate(each, config.rope_base, position, slowing) for each in (query_BLhK, key_BLgK))
    mixed_BLhK = attend(parallel, query_BLhK, key_BLgK, value_BLgK, x.get("segments"))
    out_BlD = tensor.product_scatter(split, mixed_BLhK.reshape(*mixed_BLhK.shape[:2], -1), params["out"])
    return (add_biases([out_BlD], [params["out_bias"]])[0] if config.attention_bias == "all" else out_BlD), x


def _own_biases(config: TransformerConfig, parallel: ParallelContext, params: Params) -> list[Array]:
    """The biases of the columns of query, key and value that this device computes."""
    key, value = (
        tensor.own_key_value_weight(
            parallel.tensor, params[f"{name}_bias"][None, :], config.heads, config.num_kv_heads
        )[0]
        for name in ("key", "value")
    )
    return [params["query_bias"], key, value]


def attend(
    parallel: ParallelContext, query_BLhK: Array, key_BLgK: Array, value_BLgK: Array, segment_BL: Array | None
) -> Array:
    """Causal attention between the positions of a row, wherever they are."""
    config = parallel.context
    if config.size == 1:
        return causal_attention(query_BLhK, key_BLgK, value_BLgK, *(() if segment_BL is None else (segment_BL,)))
    if config.attention == "ring":
        return ring_attention(query_BLhK, key_BLgK, value_BLgK, config=config, segment_BL=segment_BL)
    return ulysses_attention(
        query_BLhK, key_BLgK, value_BLgK, attend=causal_attention, config=config, segment_BL=segment_BL
    )


def _mlp(
    config: TransformerConfig, parallel: ParallelContext, params: Params, x_BlD: Array, x: Hidden
) -> tuple[Array, Hidden]:
    names, between = inward(config), _swiglu if config.mlp == "swiglu" else _gelu
    inner_BLf = tensor.gather_products(parallel.tensor, x_BlD, [params[name] for name in names])
    if config.mlp_bias:
        inner_BLf = add_biases(inner_BLf, [params[f"{name}_bias"] for name in names])
    out_BlD = tensor.product_scatter(parallel.tensor, between(*inner_BLf), params["down"])
    return (add_biases([out_BlD], [params["down_bias"]])[0] if config.mlp_bias else out_BlD), x


def _held(parallel: ParallelContext, x_BL: Array) -> Array:
    """The positions of whole rows that this device's `context` group works on."""
    if parallel.context.size == 1:
        return x_BL
    return jnp.take(x_BL, held_positions(parallel, x_BL.shape[1]), axis=1)


def _rotary_positions(config: TransformerConfig, parallel: ParallelContext, x: Hidden) -> Array | None:
    if "positions" in x:
        return _held(parallel, x["positions"])
    return None if parallel.context.size == 1 else held_positions(parallel, config.length)


def _learned_positions(parallel: ParallelContext, table_PD: Array, batch: Batch) -> Array:
    """The rows of the table for this device's own positions, (B, l, D), or (1, l, D) where all rows are alike."""
    own_l = own_positions(parallel, batch["inputs"].shape[1])
    position = jnp.take(batch["positions"], own_l, axis=1) if "positions" in batch else own_l[None]
    return jnp.take(table_PD, position, axis=0)


def _slowing(config: TransformerConfig) -> Slowing | None:
    if config.rope_factor == 1:
        return None
    return Slowing(config.rope_factor, config.rope_trained_length, config.rope_slow_turns, config.rope_fast_turns)


def _dropout(
    config: TransformerConfig, parallel: ParallelContext, x_BlD: Array, x: Hidden, key: Array | None, name: str
) -> Array:
    if "example" not in x or key is None:
        return x_BlD
    position_l = own_positions(parallel, x_BlD.shape[1] * parallel.tensor.size * parallel.context.size)
    return dropout(x_BlD, x["example"], position_l, key, name=name, rate=config.dropout)


@recompute
def _swiglu(gate_BLF: Array, up_BLF: Array) -> Array:
    """Recomputed in backward from its two inputs: cheaper than writing and reading what lies between."""
    return jax.nn.silu(gate_BLF) * up_BLF


@recompute
def _gelu(up_BLF: Array) -> Array:
    return jax.nn.gelu(up_BLF, approximate=True)


def logits(config: TransformerConfig, parallel: ParallelContext, groups: dict[str, Params], x: Hidden) -> Array:
    """Scores of the next token, (B, L, v) in float32 or wider, at the positions of this device's `context` group."""
    normed_BlD = norm(config, x["hidden"], groups["head"])
    normed_BLD = tensor.gather_positions(parallel.tensor, normed_BlD)
    table_Dv = groups["embed"]["tokens"].T if config.tied else groups["head"]["logits"]
    wide = jnp.promote_types(normed_BLD.dtype, jnp.float32)
    normed_BLD, table_Dv = weight_first(normed_BLD, table_Dv)
    logits_BLv = jnp.einsum("BLD,DV->BLV", normed_BLD, table_Dv, preferred_element_type=wide)
    return name_output(logits_BLv, "head/output")


def head(
    config: TransformerConfig,
    parallel: ParallelContext,
    groups: dict[str, Params],
    x: Hidden,
    batch: Batch,
    key: Array | None,
) -> tuple[Array, Array]:
    """This device's share of the cross-entropy of the next tokens as (sum, weight)."""
    logits_BLv = logits(config, parallel, groups, x)
    targets_BL = _held(parallel, batch["targets"])
    if parallel.tensor.size == 1:
        return cross_entropy(logits_BLv, targets_BL, _held(parallel, batch["weights"]))
    own_l = own_positions(parallel, batch["weights"].shape[1])
    return tensor.split_cross_entropy(
        parallel.tensor, logits_BLv, targets_BL, jnp.take(batch["weights"], own_l, axis=1)
    )


def predict(config: TransformerConfig, params: dict[str, Params], batch: Batch, *, mlp: Half | None = None) -> Array:
    """Logits (B, L, V) at every position of `batch["inputs"]`, without dropout."""
    x = embed(config, WHOLE, params, batch, None)

    def body(x: Hidden, block_params: Params) -> tuple[Hidden, None]:
        return block(config, WHOLE, block_params, x, None, mlp=mlp), None

    x, _ = lax.scan(body, x, params["blocks"])
    return logits(config, WHOLE, params, x)
