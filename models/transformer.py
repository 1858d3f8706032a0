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

Optional parameters:

    embed/positions                    (P, D)       learned positions, P rows
    blocks/attention/(query|key)_norm  (N, K)       norms of heads
    blocks/attention/query_bias        (N, H * K)   and (key|value)_bias (N, G * K), out_bias (N, D)
    blocks/mlp/(gate|up)_bias          (N, F)       and down_bias (N, D); no gate with GELU
    .../norm_bias                      like norm    beside every LayerNorm

Activations that layout rules can name: embed/output, blocks/attention/output and blocks/mlp/output (B, L, D), and
head/output (B, L, V), the logits.

The default options give the LLaMA architecture; others give Qwen or GPT-2 (`hugging_face/`). Parameters arrive in the
compute dtype. Norms, rotations, softmax and the loss use float32 or wider.

Every function takes the parallel context, `parallel`, as an argument. The default is plain JAX on one device. Otherwise
each device holds the parts of the parameters that `rules` gives, keeps its own positions between products, and gathers
and scatters them around each product (`parallel/tensor.py`, `parallel/context.py`).

Sources: Vaswani et al. 2017, "Attention Is All You Need"; Touvron et al. 2023, "LLaMA" (this architecture);
Shazeer 2020, "GLU Variants Improve Transformer" (SwiGLU).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..mesh.errors import UserError
from ..parallel import expert, tensor
from ..parallel.blocks.attention.methods import ATTENTION
from ..parallel.model import Batch, BlockModel, ParallelContext, Params
from ..parallel.sharding.named_outputs import name_output
from ..parallel.sharding.parallel_context import held_positions, own_positions
from ..parallel.xla.product import weight_first
from .attention import Slowing, rotate
from .chunked_loss import chunked_cross_entropy, count_chunks
from .fused_attention import choose_attention
from .layers import add_biases, cross_entropy, dropout, head_norm, norm, recompute, truncated_normal
from .transformer_config import TransformerConfig
from .transformer_split import split_problems, split_rules, traffic

InitMLP: TypeAlias = Callable[[Any, Array], Params]
"""Draws the parameters of the second half of one block from its key."""


def init(config: TransformerConfig, key: Array, *, init_mlp: InitMLP | None = None) -> dict[str, Params]:
    """Draws the parameters; block n's do not depend on how many blocks there are.

    Embeddings have deviation 1, the scale of the blocks; a table that makes logits has D ** -0.5.
    """
    D, V = config.width, config.vocabulary
    head_std = D**-0.5
    tokens = truncated_normal(key, "embed/tokens", (V, D), head_std if config.tied else 1.0)
    params: dict[str, Params] = {"embed": {"tokens": tokens}, "head": _init_norm(config)}
    if config.position_rows:
        std = head_std if config.tied else 1.0
        params["embed"]["positions"] = truncated_normal(key, "embed/positions", (config.position_rows, D), std)
    if not config.tied:
        params["head"]["logits"] = truncated_normal(key, "head/logits", (D, V), head_std)
    block_keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(config.layers))
    params["blocks"] = jax.vmap(functools.partial(_init_block, config, init_mlp or _init_mlp))(block_keys)
    return params


def _init_block(config: TransformerConfig, init_mlp: InitMLP, key: Array) -> Params:
    D = config.width
    query_width, kv_width = config.heads * config.head_size, config.num_kv_heads * config.head_size
    matrix = functools.partial(draw_matrix, config, key)
    attention = {
        **_init_norm(config),
        "query": matrix("attention/query", (D, query_width)),
        "key": matrix("attention/key", (D, kv_width)),
        "value": matrix("attention/value", (D, kv_width)),
        "out": matrix("attention/out", (query_width, D), on_residual=True),
    }
    biased = {"none": (), "inputs": ("query", "key", "value"), "all": ("query", "key", "value", "out")}
    attention |= _init_biases(attention, biased[config.attention_bias])
    if config.head_norm:
        attention |= {f"{name}_norm": jnp.ones((config.head_size,), jnp.float32) for name in ("query", "key")}
    return {"attention": attention, "mlp": init_mlp(config, key)}


def _init_mlp(config: TransformerConfig, key: Array) -> Params:
    D, F = config.width, config.mlp_size
    mlp = {
        **_init_norm(config),
        **{name: draw_matrix(config, key, f"mlp/{name}", (D, F)) for name in inward(config)},
        "down": draw_matrix(config, key, "mlp/down", (F, D), on_residual=True),
    }
    return mlp | _init_biases(mlp, (*inward(config), "down") if config.mlp_bias else ())


def inward(config: TransformerConfig) -> tuple[str, ...]:
    """Returns the names of the first matrices of the MLP."""
    return ("gate", "up") if config.mlp == "swiglu" else ("up",)


def _init_norm(config: TransformerConfig) -> Params:
    scale = {"norm": jnp.ones((config.width,), jnp.float32)}
    return scale if config.norm == "rms" else {**scale, "norm_bias": jnp.zeros((config.width,), jnp.float32)}


def _init_biases(matrices: Params, names: Sequence[str]) -> Params:
    return {f"{name}_bias": jnp.zeros((matrices[name].shape[-1],), jnp.float32) for name in names}


def draw_matrix(
    config: TransformerConfig, key: Array, name: str, shape: tuple[int, ...], *, on_residual: bool = False
) -> Array:
    """Draws a matrix (..., in, out) that keeps the scale of its inputs.

    The matrices whose outputs are added to the residual stream, two in each block, share its scale.
    """
    scale = (2 * config.layers) ** -0.5 if on_residual else 1.0
    return truncated_normal(key, name, shape, scale * shape[-2] ** -0.5)


Hidden = dict[str, Array]
"""The input and output of blocks: "hidden" (B, l, D); with dropout "example" (B,), and for packed documents "segments"
(B, L) and "positions" (B, L) in their document, of whole rows."""

Half: TypeAlias = Callable[[Any, ParallelContext, Params, Array, Hidden], tuple[Array, Hidden]]
"""Half of a block: `half(config, parallel, params, normed (B, l, D), x) -> (change of the residual stream, x)`."""

WHOLE = ParallelContext()
"""The context of one device, without any split."""


def transformer(config: TransformerConfig, parallel: ParallelContext = WHOLE) -> BlockModel:
    """Builds the model.

    Args:
        config: Sizes and options, with vocabulary and length.
        parallel: The parallel context, the split of the work over the mesh. By default, nothing is split.

    Returns:
        A language model over batches {"inputs", "targets", "weights", "example"} and, for packed documents, "segments"
        and "positions"; `predict` gives logits (B, L, V).

    Raises:
        UserError: The vocabulary or the length is still 0, or the mesh does not divide the sizes.
    """
    unknown = [name for name in ("vocabulary", "length") if not getattr(config, name)]
    if unknown:
        raise UserError("\n".join(f"model.{name} is missing, and the data does not determine it." for name in unknown))
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
    """Looks up the tokens; a token outside the vocabulary, or a position outside its table, gives NaN."""
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
    mixed_BLhK = attend(config, parallel, query_BLhK, key_BLgK, value_BLgK, x.get("segments"))
    out_BlD = tensor.product_scatter(split, mixed_BLhK.reshape(*mixed_BLhK.shape[:2], -1), params["out"])
    return (add_biases([out_BlD], [params["out_bias"]])[0] if config.attention_bias == "all" else out_BlD), x


def _own_biases(config: TransformerConfig, parallel: ParallelContext, params: Params) -> list[Array]:
    """Returns the biases of the columns of query, key and value that this device computes."""
    key, value = (
        tensor.own_key_value_weight(
            parallel.tensor, params[f"{name}_bias"][None, :], config.heads, config.num_kv_heads
        )[0]
        for name in ("key", "value")
    )
    return [params["query_bias"], key, value]


def attend(
    config: TransformerConfig,
    parallel: ParallelContext,
    query_BLhK: Array,
    key_BLgK: Array,
    value_BLgK: Array,
    segment_BL: Array | None,
) -> Array:
    """Applies causal attention between the positions of a row, on any device."""
    context, attention = parallel.context, choose_attention(config.attention, parallel.platform)
    if context.size == 1:
        return attention(query_BLhK, key_BLgK, value_BLgK, segment_BL)
    method = ATTENTION[context.attention]
    return method(query_BLhK, key_BLgK, value_BLgK, attend=attention, config=context, segment_BL=segment_BL)


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
    """Returns the positions of whole rows that this device's `context` group computes."""
    if parallel.context.size == 1:
        return x_BL
    return jnp.take(x_BL, held_positions(parallel, x_BL.shape[1]), axis=1)


def _rotary_positions(config: TransformerConfig, parallel: ParallelContext, x: Hidden) -> Array | None:
    if "positions" in x:
        return _held(parallel, x["positions"])
    return None if parallel.context.size == 1 else held_positions(parallel, config.length)


def _learned_positions(parallel: ParallelContext, table_PD: Array, batch: Batch) -> Array:
    """Returns the rows of the table for this device's own positions, (B, l, D), or (1, l, D) if all "
    "rows are the same."""
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
    """Applies SwiGLU, recomputed in backward: cheaper than writing and reading the intermediate values."""
    return jax.nn.silu(gate_BLF) * up_BLF


@recompute
def _gelu(up_BLF: Array) -> Array:
    return jax.nn.gelu(up_BLF, approximate=True)


def _head_factors(
    config: TransformerConfig, parallel: ParallelContext, groups: dict[str, Params], x: Hidden
) -> tuple[Array, Array]:
    """Returns the factors of the logits: (B, L, D) and (D, v)."""
    normed_BlD = norm(config, x["hidden"], groups["head"])
    normed_BLD = tensor.gather_positions(parallel.tensor, normed_BlD)
    table_Dv = groups["embed"]["tokens"].T if config.tied else groups["head"]["logits"]
    return weight_first(normed_BLD, table_Dv)


def logits(config: TransformerConfig, parallel: ParallelContext, groups: dict[str, Params], x: Hidden) -> Array:
    """Returns scores of the next token, (B, L, v) in float32 or wider, at the positions of this "
    "device's `context` group."""
    normed_BLD, table_Dv = _head_factors(config, parallel, groups, x)
    wide = jnp.promote_types(normed_BLD.dtype, jnp.float32)
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
    """Returns this device's share of the cross-entropy of the next tokens as (sum, weight)."""
    targets_BL = _held(parallel, batch["targets"])
    if parallel.tensor.size == 1:
        weights_BL, hidden = _held(parallel, batch["weights"]), x["hidden"]
        chunks = count_chunks(*targets_BL.shape, config.vocabulary, hidden.dtype)
        if chunks > 1:
            return chunked_cross_entropy(*_head_factors(config, parallel, groups, x), targets_BL, weights_BL, chunks)
        return cross_entropy(logits(config, parallel, groups, x), targets_BL, weights_BL)
    logits_BLv = logits(config, parallel, groups, x)
    own_l = own_positions(parallel, batch["weights"].shape[1])
    return tensor.split_cross_entropy(
        parallel.tensor, logits_BLv, targets_BL, jnp.take(batch["weights"], own_l, axis=1)
    )


def predict(config: TransformerConfig, params: dict[str, Params], batch: Batch, *, mlp: Half | None = None) -> Array:
    """Returns logits (B, L, V) at every position of `batch["inputs"]`, without dropout."""
    x = embed(config, WHOLE, params, batch, None)

    def body(x: Hidden, block_params: Params) -> tuple[Hidden, None]:
        return block(config, WHOLE, block_params, x, None, mlp=mlp), None

    x, _ = lax.scan(body, x, params["blocks"])
    return logits(config, WHOLE, params, x)
