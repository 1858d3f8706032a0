"""Flax NNX: a CNN with batch norm and dropout that is called with rngs, a small GPT, an LSTM."""

from functools import partial

import jax.numpy as jnp
from flax import nnx


class CNN(nnx.Module):
    """As its documentation reads digits; dropout keeps everything, so that losses can be compared."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.0)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(64, 16, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.0)
        self.linear2 = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x, rngs: nnx.Rngs | None = None):
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.dropout2(self.linear1(x), rngs=rngs))
        return self.linear2(x)


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


class Recurrent(nnx.Module):
    """An LSTM over embedded tokens."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(16, 8, rngs=rngs)
        self.lstm = nnx.RNN(nnx.LSTMCell(8, 8, param_dtype=jnp.float64, rngs=rngs))  # that of its first carry
        self.linear = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, tokens):
        return self.linear(self.lstm(self.embedding(tokens))[:, -1])
