"""Flax Linen: a residual network of exchangeable layers, a recurrent network, a language model with annotated axes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn


class Block(nn.Module):
    """Two convolutions beside the input; the layers are given."""

    filters: int
    conv: Any
    norm: Any
    act: Callable

    @nn.compact
    def __call__(self, x):
        y = self.act(self.norm()(self.conv(self.filters, (3, 3))(x)))
        y = self.norm(scale_init=nn.initializers.zeros_init())(self.conv(self.filters, (3, 3))(y))
        if x.shape != y.shape:
            x = self.norm(name="norm_proj")(self.conv(self.filters, (1, 1), name="conv_proj")(x))
        return self.act(x + y)


class ResNet(nn.Module):
    """As in examples of images: `partial` makes layers that know whether they train."""

    num_classes: int = 8
    num_filters: int = 8
    dtype: Any = None
    act: Callable = nn.relu

    @nn.compact
    def __call__(self, x, train: bool = True):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype)
        x = nn.relu(norm(name="bn_init")(conv(self.num_filters, (3, 3), name="conv_init")(x)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for number in range(2):
            x = Block(self.num_filters * 2**number, conv=conv, norm=norm, act=self.act)(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x)


class Layer(nn.Module):
    """Attention and two dense layers, whose parameters name their logical axes."""

    @nn.compact
    def __call__(self, x, mask):
        kernel = partial(nn.with_logical_partitioning, nn.initializers.lecun_normal())
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2, deterministic=True)(y, mask=mask)
        y = nn.Dense(16, kernel_init=kernel(("embed", "mlp")))(nn.LayerNorm()(x))
        return x + nn.Dense(8, kernel_init=kernel(("mlp", "embed")))(nn.gelu(y))


class Annotated(nn.Module):
    """A language model; layers are recomputed in backward."""

    @nn.compact
    def __call__(self, tokens, deterministic: bool = True):
        embed = nn.Embed(16, 8, embedding_init=nn.with_partitioning(nn.initializers.normal(0.5), ("vocab", "embed")))
        x = embed(tokens) + self.param("positions", nn.initializers.normal(0.1), (12, 8))
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            x = nn.remat(Layer)()(x, mask)
        return embed.attend(nn.LayerNorm()(x))
