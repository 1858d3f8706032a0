"""The mixture of experts, written plainly: every expert is computed for every position, and counts where it is kept."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from . import transformer
from .transformer import beside_tokens, draw, mlp_width, residual_scale, rms_norm, softmax, swiglu, what_a_block_reads


def differentiate(config, params, batch, key=None):
    """((sum of the weighted losses, sum of the weights), gradients of the first); `key` None is evaluation."""
    return transformer.differentiate(config, params, batch, key, loss=loss)


def loss(config, params, batch, key=None):
    """(sum, weight) as the transformer's; in training with each row's router losses, times the row's weight."""
    found = []

    def block(config, params, x, batch, key):
        x, row_losses = _block(what_a_block_reads(config), params, x, beside_tokens(batch), key)
        found.append(row_losses)
        return x

    x = transformer.run_blocks(config, params, batch, key, block)
    total, weight = transformer.next_token_loss(config, params, x, batch)
    if key is not None:
        total = total + (sum(found) * jnp.asarray(batch["weights"], total.dtype).sum(axis=1)).sum()
    return total, weight


@partial(jax.jit, static_argnums=0)
def _block(config, params, x, batch, key):
    """The residual stream (B, L, D) and each row's router losses (B,)."""
    change = transformer.attention_half(config, params["attention"], x, batch)
    x = x + transformer.drop(config, change, batch, key, "attention")
    change, losses = mixture(config, params["mlp"], rms_norm(x, params["mlp"]["norm"], config.norm_epsilon))
    return x + transformer.drop(config, change, batch, key, "mlp"), losses


def mixture(config, params, x):
    """What the experts make of (B, L, D), and the router's losses of each row (B,)."""
    expert, gate, kept, losses = route(config, params["router"], x)
    y = jnp.zeros_like(x)
    for e in range(config.experts):
        own = swiglu({name: params[name][e] for name in ("gate", "up", "down")}, x)
        for choice in range(config.top_k):
            counts = (expert[:, :, choice] == e) & kept[:, :, choice]
            y = y + jnp.where(counts, gate[:, :, choice], 0.0)[:, :, None] * own
    return y, losses


def route(config, router, x):
    """For (B, L, D): the experts chosen, their gates and whether they have a place, (B, L, k); losses (B,)."""
    rows, length, _ = x.shape
    logits = x @ router
    probability = softmax(logits)
    expert = jnp.argsort(-probability, axis=-1)[:, :, : config.top_k]
    gate = jnp.stack(
        [jnp.take_along_axis(probability, expert[:, :, k : k + 1], 2)[:, :, 0] for k in range(config.top_k)], 2
    )
    if config.top_k > 1:
        gate = gate / gate.sum(axis=2, keepdims=True)
    # A choice has as many before it as earlier choices of its row are for the same expert: position by position, at
    # each one first choice before second.
    in_order = expert.reshape(rows, -1)
    same = in_order[:, :, None] == in_order[:, None, :]
    earlier = np.tril(np.ones((length * config.top_k,) * 2, bool), -1)
    place = (same & earlier[None]).sum(axis=2).reshape(expert.shape)
    limit = length
    if config.capacity_factor:
        limit = min(length, math.ceil(config.top_k * length / config.experts * config.capacity_factor))
    losses = jnp.zeros(rows, x.dtype)
    for e in range(config.experts):
        fraction = (in_order == e).sum(axis=1) / (config.top_k * length)
        losses = losses + config.auxiliary_loss * config.experts * fraction * probability[:, :, e].mean(axis=1)
    normaliser = jnp.log(jnp.exp(logits).sum(axis=2))
    return expert, gate, place < limit, losses + config.z_loss * (normaliser**2).mean(axis=1)


def init(config, key):
    """First parameters in NumPy float32."""
    return transformer.init(config, key, init_mlp=_init_experts)


def _init_experts(config, key):
    D, F, E = config.width, mlp_width(config), config.experts
    return {
        "norm": np.ones(D, np.float32),
        "router": draw(key, "mlp/router", (D, E), D**-0.5),
        "gate": draw(key, "mlp/gate", (E, D, F), D**-0.5),
        "up": draw(key, "mlp/up", (E, D, F), D**-0.5),
        "down": draw(key, "mlp/down", (E, F, D), F**-0.5 * residual_scale(config)),
    }
