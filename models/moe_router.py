"""The router of a mixture of experts: which experts each position goes to, with what weight, and what has no place.

Letters: B rows, L positions of a row held by this device's `context` group, W positions of a whole row, E experts,
k experts that a position chooses, D width.

Everything is counted along one row, wherever its positions are and whatever rows are beside it: a choice, a dropped
position and the losses are the same on every mesh and in every microbatch. Positions without weight count like others.

A row's places with an expert go in the order of positions, at each one first choice before second. So whether a
position keeps its place depends on no later one, and a model that was trained so can be read from left to right.

Sources: Lepikhin et al. 2020, "GShard", section 2.2 (capacity in groups; here a group is a row, and places go position
by position instead of all first choices first); Fedus et al. 2021, "Switch Transformers", section 2.2 (auxiliary loss);
Zoph et al. 2022, "ST-MoE", section 3.3 (z-loss).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..parallel import context
from ..parallel.expert import places
from ..parallel.model import ParallelContext
from ..parallel.sharding.parallel_context import held_positions
from .moe_config import MoEConfig


class Routing(NamedTuple):
    """What the router decides for the positions that a device holds.

    Attributes:
        expert_BLk: int32, (B, L, k), the experts chosen, likeliest first.
        gate_BLk: (B, L, k), the weight of each in the result, float32 or wider.
        kept_BLk: bool, (B, L, k), false where the expert has no place left.
        loss_B: (B,), this device's share of each row's losses, weighted as `config` says.
    """

    expert_BLk: Array
    gate_BLk: Array
    kept_BLk: Array
    loss_B: Array


def route(config: MoEConfig, parallel: ParallelContext, router_DE: Array, x_BLD: Array) -> Routing:
    """Chooses experts; computed in float32 or wider.

    With several experts for a position, their probabilities are scaled to add up to 1; with one, its probability is its
    weight, since otherwise no gradient would reach the router.

    Args:
        config: Sizes and choices.
        parallel: The split; devices along `tensor` all route the same positions.
        router_DE: (D, E), whole on every device.
        x_BLD: (B, L, D), per-device.
    """
    wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
    logits_BLE = x_BLD.astype(wide) @ router_DE.astype(wide)
    probability_BLE = jax.nn.softmax(logits_BLE, axis=-1)
    gate_BLk, expert_BLk = lax.top_k(probability_BLE, config.top_k)
    if config.top_k > 1:
        gate_BLk = gate_BLk / jnp.sum(gate_BLk, axis=-1, keepdims=True)
    place_BLk, count_BE = _places(config, parallel, expert_BLk)
    length = x_BLD.shape[1] * parallel.context.size
    kept_BLk = place_BLk < config.capacity(length)
    fraction_BE = count_BE.astype(wide) / (config.top_k * length)
    loss_B = _losses(config, logits_BLE, probability_BLE, fraction_BE, length) / parallel.tensor.size
    return Routing(expert_BLk, gate_BLk, kept_BLk, loss_B)


def _losses(config: MoEConfig, logits_BLE: Array, probability_BLE: Array, fraction_BE: Array, length: int) -> Array:
    """Of each row, (B,): E * sum over experts of (fraction of choices) * (mean probability), which is 1 where both are
    equal for all experts; and the mean square of the log of the normaliser. Sums over the positions held: shares."""
    mean_BE = jnp.sum(probability_BLE, axis=1) / length
    auxiliary_B = config.experts * jnp.sum(fraction_BE * mean_BE, axis=-1)
    z_B = jnp.sum(jax.nn.logsumexp(logits_BLE, axis=-1) ** 2, axis=1) / length
    return config.auxiliary_loss * auxiliary_B + config.z_loss * z_B


def gathers_choices(config: MoEConfig, parallel: ParallelContext) -> bool:
    """Whether a device needs the choices of positions that others hold: for places, or for the auxiliary loss."""
    return parallel.context.size > 1 and (config.drops or config.auxiliary_loss > 0)


def _places(config: MoEConfig, parallel: ParallelContext, expert_BLk: Array) -> tuple[Array, Array]:
    """How many earlier choices of the row each choice has before it, (B, L, k), and those for each expert, (B, E)."""
    whole_BWk = expert_BLk
    if gathers_choices(config, parallel):
        gathered_BWk = lax.all_gather(expert_BLk, context.AXIS, axis=1, tiled=True)
        whole_BWk = jnp.take(gathered_BWk, _order_of_gathered(parallel, gathered_BWk.shape[1]), axis=1)
    place_Bn, count_BE = places(whole_BWk.reshape(whole_BWk.shape[0], -1), None, config.experts)
    place_BWk = place_Bn.reshape(whole_BWk.shape)
    if whole_BWk is expert_BLk:
        return place_BWk, count_BE
    return jnp.take(place_BWk, held_positions(parallel, place_BWk.shape[1]), axis=1), count_BE


def _order_of_gathered(parallel: ParallelContext, length: int) -> np.ndarray:
    """Where position 0, 1, ... of a row lies in what is gathered from device 0, 1, ... of `context`."""
    config = parallel.context
    chunks = [chunk for rank in range(config.size) for chunk in context.chunks_of(rank, config)]
    positions = np.arange(length).reshape(config.num_chunks, -1)[chunks]
    return np.argsort(positions.reshape(-1))
