"""The first parameters of a transformer: what is drawn, how large, and that no draw depends on the mesh or the depth.

Their paths and shapes, and the letters, are those of `transformer.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from ..parallel.model import Params
from .layers.initializers import truncated_normal
from .transformer_config import TransformerConfig

InitMLP: TypeAlias = Callable[[Any, Array], Params]
"""Draws the parameters of the second half of one block from its key."""


def init(config: TransformerConfig, key: Array, *, init_mlp: InitMLP | None = None) -> dict[str, Params]:
    """Draws the parameters; block n's do not depend on how many blocks there are.

    Embeddings have deviation 1, the scale that blocks work at; a table that logits are made with has D ** -0.5.
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
    """The matrices that the MLP begins with."""
    return ("gate", "up") if config.mlp == "swiglu" else ("up",)


def _init_norm(config: TransformerConfig) -> Params:
    scale = {"norm": jnp.ones((config.width,), jnp.float32)}
    return scale if config.norm == "rms" else {**scale, "norm_bias": jnp.zeros((config.width,), jnp.float32)}


def _init_biases(matrices: Params, names: Sequence[str]) -> Params:
    return {f"{name}_bias": jnp.zeros((matrices[name].shape[-1],), jnp.float32) for name in names}


def draw_matrix(
    config: TransformerConfig, key: Array, name: str, shape: tuple[int, ...], *, on_residual: bool = False
) -> Array:
    """Draws a matrix (..., in, out) that keeps the scale of what goes through it.

    The matrices that end on the residual stream, two in each block, share its scale out.
    """
    scale = (2 * config.layers) ** -0.5 if on_residual else 1.0
    return truncated_normal(key, name, shape, scale * shape[-2] ** -0.5)
