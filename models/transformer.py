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

`Transformer` has the parallel context as an attribute. The default is plain JAX on one device. Otherwise each device
holds the parts of the parameters that `rules` gives, keeps its own positions between products, and gathers
and scatters them around each product (`parallel/tensor.py`, `parallel/context.py`).

Sources: Vaswani et al. 2017, "Attention Is All You Need"; Touvron et al. 2023, "LLaMA" (this architecture);
Shazeer 2020, "GLU Variants Improve Transformer" (SwiGLU).
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..mesh.errors import raise_problems
from ..parallel import tensor
from ..parallel.blocks.attention.methods import ATTENTION
from ..parallel.model import Batch, BlockModel, ParallelContext, Params
from ..parallel.sharding.named_outputs import name_output
from ..parallel.sharding.parallel_context import held_positions, own_positions
from ..parallel.xla.product import weight_first
from . import layers
from .attention import Slowing, causal_attention, choose_attention, rotate
from .transformer_config import TransformerConfig
from .transformer_split import SplitTransformer

WHOLE = ParallelContext()
"""The context of one device, without any split."""

Hidden = dict[str, Array]
"""The input and output of blocks: "hidden" (B, l, D); with dropout "example" (B,), and for packed documents "segments"
(B, L) and "positions" (B, L) in their document, of whole rows."""


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
    return Transformer(config, parallel).model("transformer")


class Transformer(SplitTransformer):
    """The functions of the model; a mixture of experts replaces the second half of a block."""

    def model(self, name: str) -> BlockModel:
        """Returns the model; UserError for sizes that are missing or that the mesh does not divide."""
        raise_problems(self.problems())
        config = self.config
        return BlockModel(
            init=self.init,
            embed=self.embed,
            block=self.block,
            head=self.head,
            num_blocks=config.layers,
            head_reads=("embed", "head") if config.tied else ("head",),
            scan_unroll=config.scan_unroll,
            predict=self.predict,
            name=name,
            flops_per_row=config.flops_per_row,
            flops_of_length=config.flops_of_length,
            parallelize=lambda parallel: type(self)(config, parallel).model(name),
            rules=self.rules,
            traffic=self.traffic if self.parallel.splits_anything else None,
        )

    def init(self, key: Array) -> dict[str, Params]:
        """Draws the parameters; block n's do not depend on how many blocks there are.

        Embeddings have deviation 1, the scale of the blocks; a table that makes logits has D ** -0.5.
        """
        config = self.config
        D, V = config.width, config.vocabulary
        table_std = D**-0.5 if config.tied else 1.0
        tokens = layers.truncated_normal(key, "embed/tokens", (V, D), table_std)
        params: dict[str, Params] = {"embed": {"tokens": tokens}, "head": self._init_norm()}
        if rows := config.position_rows:
            params["embed"]["positions"] = layers.truncated_normal(key, "embed/positions", (rows, D), table_std)
        if not config.tied:
            params["head"]["logits"] = layers.truncated_normal(key, "head/logits", (D, V), D**-0.5)
        block_keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(config.layers))
        params["blocks"] = jax.vmap(self._init_block)(block_keys)
        return params

    def _init_block(self, key: Array) -> Params:
        config = self.config
        D, K = config.width, config.head_size
        heads = {"query": config.heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
        attention = {
            **self._init_norm(),
            **{name: self._draw_matrix(key, f"attention/{name}", (D, number * K)) for name, number in heads.items()},
            "out": self._draw_matrix(key, "attention/out", (config.heads * K, D), on_residual=True),
        }
        biased = {"none": (), "inputs": ("query", "key", "value"), "all": ("query", "key", "value", "out")}
        attention |= _init_biases(attention, biased[config.attention_bias])
        if config.head_norm:
            attention |= {f"{name}_norm": jnp.ones((K,), jnp.float32) for name in ("query", "key")}
        return {"attention": attention, "mlp": self._init_mlp(key)}

    def _init_mlp(self, key: Array) -> Params:
        D, F = self.config.width, self.config.mlp_size
        mlp = {
            **self._init_norm(),
            **{name: self._draw_matrix(key, f"mlp/{name}", (D, F)) for name in self._inward},
            "down": self._draw_matrix(key, "mlp/down", (F, D), on_residual=True),
        }
        return mlp | _init_biases(mlp, (*self._inward, "down") if self.config.mlp_bias else ())

    @property
    def _inward(self) -> tuple[str, ...]:
        """The names of the first matrices of the MLP."""
        return ("gate", "up") if self.config.mlp == "swiglu" else ("up",)

    def _init_norm(self) -> Params:
        D = self.config.width
        scale = {"norm": jnp.ones((D,), jnp.float32)}
        return scale if self.config.norm == "rms" else {**scale, "norm_bias": jnp.zeros((D,), jnp.float32)}

    def _draw_matrix(self, key: Array, name: str, shape: tuple[int, ...], *, on_residual: bool = False) -> Array:
        """Draws a matrix (..., in, out) that keeps the scale of its inputs.

        The matrices whose outputs are added to the residual stream, two in each block, share its scale.
        """
        scale = (2 * self.config.layers) ** -0.5 if on_residual else 1.0
        return layers.truncated_normal(key, name, shape, scale * shape[-2] ** -0.5)

    def embed(self, groups: dict[str, Params], batch: Batch, key: Array | None) -> Hidden:
        """Looks up the tokens; a token outside the vocabulary, or a position outside its table, gives NaN."""
        tokens_BL = self._held(batch["inputs"])
        hidden_BlD = tensor.embed_tokens(self.parallel.tensor, groups["embed"]["tokens"], tokens_BL)
        if self.config.positions == "learned":
            hidden_BlD += self._learned_positions(groups["embed"]["positions"], batch)
        hidden_BlD = name_output(hidden_BlD, "embed/output")
        x = {"hidden": hidden_BlD, **{name: batch[name] for name in ("segments", "positions") if name in batch}}
        if key is None or not self.config.dropout:
            return x
        x = {**x, "example": batch["example"]}
        return {**x, "hidden": self._dropout(hidden_BlD, x, key, "embed")}

    def block(self, params: Params, x: Hidden, key: Array | None) -> Hidden:
        """Adds attention, then the MLP, to the residual stream."""
        for name, half in (("attention", self._attention), ("mlp", self._mlp)):
            change_BlD, x = half(params[name], self._norm(x["hidden"], params[name]), x)
            change_BlD = name_output(change_BlD, f"blocks/{name}/output")
            x = {**x, "hidden": x["hidden"] + self._dropout(change_BlD, x, key, name)}
        return x

    def _attention(self, params: Params, x_BlD: Array, x: Hidden) -> tuple[Array, Hidden]:
        config, split = self.config, self.parallel.tensor
        weights = [params["query"], *(self._own_key_value(params[name]) for name in ("key", "value"))]
        products = tensor.gather_products(split, x_BlD, weights)
        if config.attention_bias != "none":
            key, value = (self._own_key_value(params[f"{name}_bias"][None, :])[0] for name in ("key", "value"))
            products = layers.add_biases(products, [params["query_bias"], key, value])
        query_BLhK, key_BLgK, value_BLgK = (each.reshape(*each.shape[:2], -1, config.head_size) for each in products)
        if config.head_norm:
            query_BLhK = layers.head_norm(query_BLhK, params["query_norm"], config.norm_epsilon)
            key_BLgK = layers.head_norm(key_BLgK, params["key_norm"], config.norm_epsilon)
        if config.positions == "rotary":
            position, slowing = self._rotary_positions(x), slowing_of(config)
            query_BLhK, key_BLgK = (
                rotate(each, config.rope_base, position, slowing) for each in (query_BLhK, key_BLgK)
            )
        mixed_BLhK = self._attend(query_BLhK, key_BLgK, value_BLgK, x.get("segments"))
        out_BlD = tensor.product_scatter(split, mixed_BLhK.reshape(*mixed_BLhK.shape[:2], -1), params["out"])
        return (layers.add_biases([out_BlD], [params["out_bias"]])[0] if config.attention_bias == "all" else out_BlD), x

    def _own_key_value(self, weight: Array) -> Array:
        """Returns the columns of a key or value matrix that this device computes."""
        return tensor.own_key_value_weight(self.parallel.tensor, weight, self.config.heads, self.config.num_kv_heads)

    def _attend(self, query_BLhK: Array, key_BLgK: Array, value_BLgK: Array, segment_BL: Array | None) -> Array:
        """Applies causal attention between the positions of a row, on any device."""
        context, attention = self.parallel.context, choose_attention(self.config.attention, self.parallel.platform)
        if context.size == 1:
            return attention(query_BLhK, key_BLgK, value_BLgK, segment_BL)
        implementation = "xla" if attention is causal_attention else self.config.attention
        options = {"attend": attention, "implementation": implementation, "config": context, "segment_BL": segment_BL}
        return ATTENTION[context.attention](query_BLhK, key_BLgK, value_BLgK, **options)

    def _mlp(self, params: Params, x_BlD: Array, x: Hidden) -> tuple[Array, Hidden]:
        names, between = self._inward, _swiglu if self.config.mlp == "swiglu" else _gelu
        inner_BLf = tensor.gather_products(self.parallel.tensor, x_BlD, [params[name] for name in names])
        if self.config.mlp_bias:
            inner_BLf = layers.add_biases(inner_BLf, [params[f"{name}_bias"] for name in names])
        out_BlD = tensor.product_scatter(self.parallel.tensor, between(*inner_BLf), params["down"])
        return (layers.add_biases([out_BlD], [params["down_bias"]])[0] if self.config.mlp_bias else out_BlD), x

    def _held(self, x_BL: Array) -> Array:
        """Returns the positions of whole rows that this device's `context` group computes."""
        if self.parallel.context.size == 1:
            return x_BL
        return jnp.take(x_BL, held_positions(self.parallel, x_BL.shape[1]), axis=1)

    def _rotary_positions(self, x: Hidden) -> Array | None:
        if "positions" in x:
            return self._held(x["positions"])
        return None if self.parallel.context.size == 1 else held_positions(self.parallel, self.config.length)

    def _learned_positions(self, table_PD: Array, batch: Batch) -> Array:
        """Returns the rows of the table for this device's own positions, (B, l, D), or (1, l, D) if all are the
        same."""
        own_l = own_positions(self.parallel, batch["inputs"].shape[1])
        position = jnp.take(batch["positions"], own_l, axis=1) if "positions" in batch else own_l[None]
        return jnp.take(table_PD, position, axis=0)

    def _dropout(self, x_BlD: Array, x: Hidden, key: Array | None, name: str) -> Array:
        if "example" not in x or key is None:
            return x_BlD
        whole = x_BlD.shape[1] * self.parallel.tensor.size * self.parallel.context.size
        position_l = own_positions(self.parallel, whole)
        return layers.dropout(x_BlD, x["example"], position_l, key, name=name, rate=self.config.dropout)

    def _norm(self, x_BLD: Array, params: Params) -> Array:
        """Applies the norm, with the parameters `norm` (D,) and, for a LayerNorm, `norm_bias` (D,)."""
        if self.config.norm == "rms":
            return layers.rms_norm(x_BLD, params["norm"], self.config.norm_epsilon)
        return layers.layer_norm(x_BLD, params["norm"], params["norm_bias"], self.config.norm_epsilon)

    def _head_factors(self, groups: dict[str, Params], x: Hidden) -> tuple[Array, Array]:
        """Returns the factors of the logits: (B, L, D) and (D, v)."""
        normed_BlD = self._norm(x["hidden"], groups["head"])
        normed_BLD = tensor.gather_positions(self.parallel.tensor, normed_BlD)
        table_Dv = groups["embed"]["tokens"].T if self.config.tied else groups["head"]["logits"]
        return weight_first(normed_BLD, table_Dv)

    def logits(self, groups: dict[str, Params], x: Hidden) -> Array:
        """Returns scores of the next token, (B, L, v) in float32 or wider, at the positions of this device's
        `context` group."""
        normed_BLD, table_Dv = self._head_factors(groups, x)
        wide = jnp.promote_types(normed_BLD.dtype, jnp.float32)
        logits_BLv = jnp.einsum("BLD,DV->BLV", normed_BLD, table_Dv, preferred_element_type=wide)
        return name_output(logits_BLv, "head/output")

    def head(self, groups: dict[str, Params], x: Hidden, batch: Batch, key: Array | None) -> tuple[Array, Array]:
        """Returns this device's share of the cross-entropy of the next tokens as (sum, weight)."""
        targets_BL = self._held(batch["targets"])
        B, L = targets_BL.shape
        chunks, size = self.loss_chunks(B, L, x["hidden"].dtype), self.parallel.tensor.size
        if chunks:
            loss = layers.cross_entropy if size == 1 else self._loss_of_chunk
            weights_BL = self._held(batch["weights"])
            return layers.chunked_cross_entropy(*self._head_factors(groups, x), targets_BL, weights_BL, chunks, loss)
        if size == 1:
            return layers.cross_entropy(self.logits(groups, x), targets_BL, self._held(batch["weights"]))
        weights_Bl = jnp.take(batch["weights"], own_positions(self.parallel, batch["weights"].shape[1]), axis=1)
        return tensor.split_cross_entropy(self.parallel.tensor, self.logits(groups, x), targets_BL, weights_Bl)

    def _loss_of_chunk(self, logits_BLv: Array, targets_BL: Array, weights_BL: Array) -> tuple[Array, Array]:
        """Returns the loss of a chunk of positions whose logits are split over `tensor`, for an equal part of them."""
        own = weights_BL.shape[1] // self.parallel.tensor.size
        weights_Bl = lax.dynamic_slice_in_dim(weights_BL, lax.axis_index(tensor.AXIS) * own, own, axis=1)
        return tensor.split_cross_entropy(self.parallel.tensor, logits_BLv, targets_BL, weights_Bl)

    def predict(self, params: dict[str, Params], batch: Batch) -> Array:
        """Returns logits (B, L, V) at every position of `batch["inputs"]`, without dropout."""
        whole = replace(self, parallel=WHOLE)

        def body(x: Hidden, block_params: Params) -> tuple[Hidden, None]:
            return whole.block(block_params, x, None), None

        x, _ = lax.scan(body, whole.embed(params, batch, None), params["blocks"])
        return whole.logits(params, x)


def _init_biases(matrices: Params, names: Sequence[str]) -> Params:
    return {f"{name}_bias": jnp.zeros((matrices[name].shape[-1],), jnp.float32) for name in names}


def slowing_of(config: TransformerConfig) -> Slowing | None:
    """Returns the slowing of a transformer's rotary frequencies; None if it has none."""
    if config.rope_factor == 1:
        return None
    return Slowing(config.rope_factor, config.rope_trained_length, config.rope_slow_turns, config.rope_fast_turns)


@layers.recompute
def _swiglu(gate_BLF: Array, up_BLF: Array) -> Array:
    """Applies SwiGLU, recomputed in backward: cheaper than writing and reading the intermediate values."""
    return jax.nn.silu(gate_BLF) * up_BLF


_gelu = layers.recompute(functools.partial(jax.nn.gelu, approximate=True))
