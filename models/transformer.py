"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU; embed / block / head.

Letters: B rows, L positions, V vocabulary, N layers, D width, F width of the MLP, H query heads, G key-value heads,
K width of a head. Shapes of the parameters (rules address them by these paths):

    embed/tokens            (V, D)
    blocks/attention/norm   (N, D)          blocks/mlp/norm   (N, D)
    blocks/attention/query  (N, D, H * K)   blocks/mlp/gate   (N, D, F)
    blocks/attention/key    (N, D, G * K)   blocks/mlp/up     (N, D, F)
    blocks/attention/value  (N, D, G * K)   blocks/mlp/down   (N, F, D)
    blocks/attention/out    (N, H * K, D)
    head/norm               (D,)
    head/logits             (D, V)          absent with tied embeddings: the head then reads embed/tokens

Parameters arrive in the compute dtype. Norms, rotations, softmax and the loss are computed in float32 or wider.

Sources: Vaswani et al. 2017, "Attention Is All You Need"; Touvron et al. 2023, "LLaMA" (this arrangement of it);
Shazeer 2020, "GLU Variants Improve Transformer" (SwiGLU).
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..parallel.model import Batch, BlockModel, Params
from .attention import causal_attention, rotate
from .cross_entropy import cross_entropy
from .dropout import dropout
from .initializers import truncated_normal
from .recompute import recompute

Hidden = dict[str, Array]
"""What flows from block to block: "hidden" (B, L, D) and, where there is dropout, "example" (B,)."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and choices of the transformer."""

    vocabulary: int = 0
    """Number of different tokens; 0 = the data's."""
    length: int = 0
    """Positions in a row, for counting operations; 0 = the data's."""
    layers: int = 4
    """Number of blocks."""
    width: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 0
    """Key-value heads, a divisor of `heads`; 0 = as many as `heads`."""
    head_width: int = 0
    """Width of a head, even; 0 = width / heads."""
    mlp_width: int = 0
    """Width between the two halves of the MLP; 0 = 8/3 of `width`, rounded up to a multiple of 64."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied: bool = False
    """Whether the head reads the embedding table instead of its own matrix."""
    dropout: float = 0.0
    """Part of the values dropped after the embedding and after each half of a block; 0 <= dropout < 1."""
    scan_unroll: int = 1
    """Blocks in one turn of the loop over blocks: more compile longer and may run faster."""

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads, worked out."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of a head, worked out."""
        return self.head_width or self.width // self.heads

    @property
    def mlp_size(self) -> int:
        """Width of the MLP, worked out."""
        return self.mlp_width or -(-8 * self.width // (3 * 64)) * 64

    @property
    def matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with: all matrices and the head, without the embedding look-up."""
        attention = 2 * self.width * self.head_size * (self.heads + self.num_kv_heads)
        return self.layers * (attention + 3 * self.width * self.mlp_size) + self.width * self.vocabulary

    @property
    def flops_per_row(self) -> float:
        """Operations of forward and backward for one row.

        6 * matmul_parameters * L (2 forward, 4 backward) and, for the two products of attention, 12 * N * H * K * L**2:
        the full square of positions, as PaLM counts it (Chowdhery et al. 2022, appendix B), although half of it is
        masked and up to 3/8 is not computed. Neither look-ups, norms and softmax nor recomputation count.
        """
        attention = 12 * self.layers * self.heads * self.head_size * self.length**2
        return float(6 * self.matmul_parameters * self.length + attention)


def _problems(config: TransformerConfig) -> list[str]:
    least = dict.fromkeys(("layers", "width", "heads", "scan_unroll"), 1)
    least |= dict.fromkeys(("vocabulary", "length", "kv_heads", "head_width", "mlp_width"), 0)
    given = {name: getattr(config, name) for name in least}
    problems = [
        f"model.{name}={given[name]} has to be at least {least[name]}." for name in least if given[name] < least[name]
    ]
    if not 0 <= config.dropout < 1:
        problems.append(f"model.dropout={config.dropout} has to be a part of the values: 0 <= dropout < 1.")
    if config.rope_base <= 1:
        problems.append(f"model.rope_base={config.rope_base} has to be over 1: frequencies fall along a head.")
    if config.norm_epsilon <= 0:
        problems.append(f"model.norm_epsilon={config.norm_epsilon} has to be over 0.")
    return problems or _head_problems(config)


def _head_problems(config: TransformerConfig) -> list[str]:
    """Checks on sizes that are all positive."""
    problems = []
    if config.heads % config.num_kv_heads:
        problems.append(
            f"model.kv_heads={config.kv_heads} does not divide model.heads={config.heads}: each key-value head serves "
            f"equally many query heads. Take one of {[n for n in range(1, config.heads + 1) if config.heads % n == 0]}."
        )
    if not config.head_width and config.width % config.heads:
        problems.append(
            f"model.width={config.width} is not divisible by model.heads={config.heads}. "
            "Change one of them or give model.head_width."
        )
    elif config.head_size % 2:
        problems.append(
            f"model.head_width: a head is {config.head_size} wide (model.head_width, or model.width={config.width} / "
            f"model.heads={config.heads}), and rotary positions turn pairs: the width has to be even."
        )
    return problems


def transformer(config: TransformerConfig) -> BlockModel:
    """Builds the model.

    Args:
        config: Its sizes and choices, with vocabulary and length.

    Returns:
        A language model over batches {"inputs", "targets", "weights", "example"}; `predict` gives logits (B, L, V).

    Raises:
        ValueError: The vocabulary or the length is still 0.
    """
    unknown = [name for name in ("vocabulary", "length") if not getattr(config, name)]
    if unknown:
        raise ValueError(
            "\n".join(f"model.{name} is not given, and the data does not tell it either." for name in unknown)
        )
    bind = functools.partial
    return BlockModel(
        init=bind(init, config),
        embed=bind(embed, config),
        block=bind(block, config),
        head=bind(head, config),
        num_blocks=config.layers,
        head_reads=("embed", "head") if config.tied else ("head",),
        scan_unroll=config.scan_unroll,
        predict=bind(predict, config),
        name="transformer",
        flops_per_row=config.flops_per_row,
    )


def init(config: TransformerConfig, key: Array) -> dict[str, Params]:
    """Draws the parameters; block n's do not depend on how many blocks there are.

    Embeddings have deviation 1, the scale that blocks work at; a table that logits are made with has D ** -0.5.
    """
    D, V = config.width, config.vocabulary
    head_std = D**-0.5
    tokens = truncated_normal(key, "embed/tokens", (V, D), head_std if config.tied else 1.0)
    params: dict[str, Params] = {"embed": {"tokens": tokens}, "head": {"norm": jnp.ones((D,), jnp.float32)}}
    if not config.tied:
        params["head"]["logits"] = truncated_normal(key, "head/logits", (D, V), head_std)
    block_keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(config.layers))
    params["blocks"] = jax.vmap(functools.partial(_init_block, config))(block_keys)
    return params


def _init_block(config: TransformerConfig, key: Array) -> Params:
    """Matrices keep the scale of what goes through them; the two that end on the residual stream share it out."""
    D, F = config.width, config.mlp_size
    query_width, kv_width = config.heads * config.head_size, config.num_kv_heads * config.head_size

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> Array:
        return truncated_normal(key, name, (rows, columns), scale * rows**-0.5)

    residual_scale = (2 * config.layers) ** -0.5
    return {
        "attention": {
            "norm": jnp.ones((D,), jnp.float32),
            "query": matrix("attention/query", D, query_width),
            "key": matrix("attention/key", D, kv_width),
            "value": matrix("attention/value", D, kv_width),
            "out": matrix("attention/out", query_width, D, residual_scale),
        },
        "mlp": {
            "norm": jnp.ones((D,), jnp.float32),
            "gate": matrix("mlp/gate", D, F),
            "up": matrix("mlp/up", D, F),
            "down": matrix("mlp/down", F, D, residual_scale),
        },
    }


def embed(config: TransformerConfig, groups: dict[str, Params], batch: Batch, key: Array | None) -> Hidden:
    """Looks up the tokens; a token outside the vocabulary gives NaN, not another token's row."""
    hidden_BLD = jnp.take(groups["embed"]["tokens"], batch["inputs"], axis=0)
    if key is None or not config.dropout:
        return {"hidden": hidden_BLD}
    example_B = batch["example"]
    hidden_BLD = dropout(hidden_BLD, example_B, key, name="embed", rate=config.dropout)
    return {"hidden": hidden_BLD, "example": example_B}


def block(config: TransformerConfig, params: Params, x: Hidden, key: Array | None) -> Hidden:
    """Adds attention, then the MLP, to the residual stream."""
    hidden_BLD = x["hidden"]
    for name, half in (("attention", _attention), ("mlp", _mlp)):
        normed_BLD = rms_norm(hidden_BLD, params[name]["norm"], config.norm_epsilon)
        change_BLD = half(config, params[name], normed_BLD)
        if "example" in x and key is not None:
            change_BLD = dropout(change_BLD, x["example"], key, name=name, rate=config.dropout)
        hidden_BLD = hidden_BLD + change_BLD
    return {**x, "hidden": hidden_BLD}


def _attention(config: TransformerConfig, params: Params, x_BLD: Array) -> Array:
    def heads(name: str) -> Array:
        return (x_BLD @ params[name]).reshape(*x_BLD.shape[:2], -1, config.head_size)

    query_BLHK, key_BLGK = rotate(heads("query"), config.rope_base), rotate(heads("key"), config.rope_base)
    mixed_BLHK = causal_attention(query_BLHK, key_BLGK, heads("value"))
    return mixed_BLHK.reshape(*x_BLD.shape[:2], -1) @ params["out"]


def _mlp(config: TransformerConfig, params: Params, x_BLD: Array) -> Array:
    return _swiglu(x_BLD @ params["gate"], x_BLD @ params["up"]) @ params["down"]


@recompute
def _swiglu(gate_BLF: Array, up_BLF: Array) -> Array:
    """Computed again in backward from its two inputs: cheaper than keeping, and re-reading, what lies between."""
    return jax.nn.silu(gate_BLF) * up_BLF


def rms_norm(x_BLD: Array, scale_D: Array, epsilon: float) -> Array:
    """Divides by the root of the mean square over the last dim; in float32 or wider, given back in x's dtype."""
    return recompute(functools.partial(_rms_norm, epsilon=epsilon))(x_BLD, scale_D)


def _rms_norm(x_BLD: Array, scale_D: Array, *, epsilon: float) -> Array:
    wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
    x = x_BLD.astype(wide)
    normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return (normed * scale_D.astype(wide)[None, None, :]).astype(x_BLD.dtype)


def logits(config: TransformerConfig, groups: dict[str, Params], x: Hidden) -> Array:
    """Scores of the next token, (B, L, V) in float32 or wider."""
    normed_BLD = rms_norm(x["hidden"], groups["head"]["norm"], config.norm_epsilon)
    table_DV = groups["embed"]["tokens"].T if config.tied else groups["head"]["logits"]
    wide = jnp.promote_types(normed_BLD.dtype, jnp.float32)
    return jnp.einsum("BLD,DV->BLV", normed_BLD, table_DV, preferred_element_type=wide)


def head(
    config: TransformerConfig, groups: dict[str, Params], x: Hidden, batch: Batch, key: Array | None
) -> tuple[Array, Array]:
    """The cross-entropy of the next tokens as (sum, weight)."""
    return cross_entropy(logits(config, groups, x), batch["targets"], batch["weights"])


def predict(config: TransformerConfig, params: dict[str, Params], batch: Batch) -> Array:
    """Logits (B, L, V) at every position of `batch["inputs"]`, without dropout."""
    x = embed(config, params, batch, None)
    x, _ = lax.scan(lambda x, block_params: (block(config, block_params, x, None), None), x, params["blocks"])
    return logits(config, params, x)
