"""Equinox: a CNN as a list of layers and functions, a GRU in a scan, a vision transformer with a flag for dropout."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax


class RNN(eqx.Module):
    """A GRU over the points of a curve, in a scan that begins with zeros; one probability."""

    hidden_size: int
    cell: eqx.Module
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, key, in_size=2, out_size=1, hidden_size=8):
        first, second = jax.random.split(key)
        self.hidden_size = hidden_size
        self.cell = eqx.nn.GRUCell(in_size, hidden_size, key=first)
        self.linear = eqx.nn.Linear(hidden_size, out_size, use_bias=False, key=second)
        self.bias = jnp.zeros(out_size)

    def __call__(self, points):
        def step(carry, point):
            return self.cell(point, carry), None

        last, _ = lax.scan(step, jnp.zeros((self.hidden_size,)), points)
        return jax.nn.sigmoid(self.linear(last) + self.bias)


class AttentionBlock(eqx.Module):
    """Attention and two layers, with dropout where a flag asks for it."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, width, heads, rate, key):
        one, two, three = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=one)
        self.linear1 = eqx.nn.Linear(width, 2 * width, key=two)
        self.linear2 = eqx.nn.Linear(2 * width, width, key=three)
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x, enable_dropout, key):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        y = jax.nn.gelu(jax.vmap(self.linear1)(jax.vmap(self.norm2)(x)))
        y = jax.vmap(self.linear2)(self.dropout(y, inference=not enable_dropout, key=key))
        return x + y


class VisionTransformer(eqx.Module):
    """Patches, a class token, blocks in a list; called with a flag and a key."""

    embed: eqx.nn.Linear
    positions: jax.Array
    cls_token: jax.Array
    blocks: list
    head: eqx.nn.Sequential

    def __init__(self, key, width=8, heads=2, rate=0.0):
        keys = jax.random.split(key, 6)
        self.embed = eqx.nn.Linear(16, width, key=keys[0])
        self.positions = jax.random.normal(keys[1], (5, width))
        self.cls_token = jax.random.normal(keys[2], (1, width))
        self.blocks = [AttentionBlock(width, heads, rate, each) for each in keys[3:5]]
        self.head = eqx.nn.Sequential([eqx.nn.LayerNorm(width), eqx.nn.Linear(width, 8, key=keys[5])])

    def __call__(self, image, enable_dropout, key):
        patches = image.reshape(2, 4, 2, 4).transpose(0, 2, 1, 3).reshape(4, 16)
        x = jnp.concatenate([self.cls_token, jax.vmap(self.embed)(patches)]) + self.positions
        for block, each in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, enable_dropout, key=each)
        return self.head(x[0])


def binary_cross_entropy(probabilities, batch):
    """Of a probability."""
    targets = batch["targets"].astype(probabilities.dtype)
    return -(targets * jnp.log(probabilities) + (1 - targets) * jnp.log(1 - probabilities))
