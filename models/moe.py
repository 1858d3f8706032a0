"""A decoder-only transformer whose MLPs are mixtures of experts: `transformer.py` with the second half of a block here.

Letters: as in `transformer.py`, and E experts, e of them on one device, k chosen by each position, N = B * L positions
on one device, M places of a buffer. The parameters of a block's second half:

    blocks/mlp/norm     (N, D)              blocks/mlp/gate   (N, E, D, F)
    blocks/mlp/router   (N, D, E)           blocks/mlp/up     (N, E, D, F)
                                            blocks/mlp/down   (N, E, F, D)

Each position goes through the k experts that the router likes best (`moe_router.py`), wherever they live
(`parallel/expert.py`). In training, each block adds the router's losses of each row to "router_loss", and the head adds
them to the loss, weighted like the row's positions; evaluation gives the cross-entropy alone.

Sources: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Lepikhin et al. 2020, "GShard"; Jiang et al. 2024,
"Mixtral of Experts" (this arrangement: SwiGLU experts in every block, weights over the chosen ones).
"""

import functools
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from ..mesh.errors import UserError
from ..parallel import context, expert, tensor
from ..parallel.blocks.grouped_experts import apply_experts
from ..parallel.collectives import Collective, Traffic, varying_zeros
from ..parallel.model import Batch, BlockModel, ParallelContext, Params
from .moe_config import MoEConfig
from .moe_router import gathers_choices, route
from .transformer import WHOLE, Hidden, block, predict, transformer
from .transformer import embed as embed_transformer
from .transformer import head as transformer_head
from .transformer_params import draw_matrix, init
from .transformer_split import around_products, attention_traffic, residual_bytes, split_problems, split_rules
from .transformer_split import traffic as transformer_traffic


def moe(config: MoEConfig, parallel: ParallelContext = WHOLE) -> BlockModel:
    """Builds the model.

    Args:
        config: Its sizes and choices, with vocabulary and length.
        parallel: The parallel context: how the work is split over the mesh. The default keeps it whole.

    Returns:
        A language model over the batches of `transformer`; "router_loss" (B,) flows beside "hidden" in training.

    Raises:
        UserError: The vocabulary or the length is still 0, or the sizes cannot be split so.
    """
    base = transformer(config)
    problems = [*split_problems(config, parallel), *expert.size_problems(parallel.expert, config.experts)]
    if problems:
        raise UserError("\n".join(problems))
    bind = functools.partial
    return replace(
        base,
        init=bind(init, config, init_mlp=_init_experts),
        embed=bind(embed, config, parallel),
        block=bind(block, config, parallel, mlp=_experts),
        head=bind(head, config, parallel),
        predict=bind(predict, config, mlp=_experts),
        name="moe",
        parallelize=bind(moe, config),
        rules=_rules(config, parallel),
        traffic=bind(traffic, config, parallel) if parallel.splits_anything else None,
    )


def _init_experts(config: MoEConfig, key: Array) -> Params:
    D, F, E = config.width, config.mlp_size, config.experts
    matrix = functools.partial(draw_matrix, config, key)
    return {
        "norm": jnp.ones((D,), jnp.float32),
        "router": matrix("mlp/router", (D, E)),
        "gate": matrix("mlp/gate", (E, D, F)),
        "up": matrix("mlp/up", (E, D, F)),
        "down": matrix("mlp/down", (E, F, D), on_residual=True),
    }


def _rules(config: MoEConfig, parallel: ParallelContext) -> dict[str, tuple[str | None, ...]]:
    """Experts are laid out over `expert`, their columns over `tensor`."""
    experts = expert.AXIS if parallel.expert.size > 1 else None
    columns = tensor.AXIS if parallel.tensor.size > 1 else None
    kept = {path: axes for path, axes in split_rules(config, parallel).items() if not path.startswith("blocks/mlp")}
    return {
        **kept,
        "blocks/mlp/(gate|up)": (None, experts, None, columns),
        "blocks/mlp/down": (None, experts, columns, None),
    }


def embed(
    config: MoEConfig, parallel: ParallelContext, groups: dict[str, Params], batch: Batch, key: Array | None
) -> Hidden:
    """As the transformer's; in training, with a sum of the router's losses for each row that begins at 0."""
    x = embed_transformer(config, parallel, groups, batch, key)
    if key is None or not (config.auxiliary_loss or config.z_loss):
        return x
    wide = jnp.promote_types(x["hidden"].dtype, jnp.float32)
    return {**x, "router_loss": varying_zeros(x["hidden"].shape[:1], wide, x["hidden"])}


def _experts(
    config: MoEConfig, parallel: ParallelContext, params: Params, x_BlD: Array, x: Hidden
) -> tuple[Array, Hidden]:
    x_BLD = tensor.gather_positions(parallel.tensor, x_BlD)
    routing = route(config, parallel, params["router"], x_BLD)
    if "router_loss" in x:
        x = {**x, "router_loss": x["router_loss"] + routing.loss_B}
    x_ND = x_BLD.reshape(-1, x_BLD.shape[2])
    expert_Nk, gate_Nk, kept_Nk = (each.reshape(-1, config.top_k) for each in routing[:3])
    buffer = _buffer(config, parallel, rows=x_BLD.shape[0], held=x_BLD.shape[1])
    placed = expert.placement(buffer, expert_Nk, kept_Nk)
    x_MD, expert_b = expert.dispatch(placed, x_ND)
    weights = {name: params[name] for name in ("gate", "up", "down")}
    y_NkD = expert.combine(placed, apply_experts(_swiglu, weights, x_MD, expert_b))
    y_ND = jnp.sum(y_NkD.astype(gate_Nk.dtype) * gate_Nk[:, :, None], axis=1).astype(x_BLD.dtype)
    return tensor.scatter_positions(parallel.tensor, y_ND.reshape(x_BLD.shape)), x


def _swiglu(weights: Params, x_mD: Array) -> Array:
    """One expert (its columns on this device) for one block of the buffer's places."""
    return (jax.nn.silu(x_mD @ weights["gate"]) * (x_mD @ weights["up"])) @ weights["down"]


def _buffer(config: MoEConfig, parallel: ParallelContext, *, rows: int, held: int) -> expert.Buffer:
    """Sizes of the buffers for `rows` rows, of each of which the device's `context` group holds `held` positions."""
    return expert.buffer_of(
        parallel.expert,
        experts=config.experts,
        top_k=config.top_k,
        positions=rows * held,
        most=rows * min(held, config.capacity(held * parallel.context.size)),
    )


def head(
    config: MoEConfig,
    parallel: ParallelContext,
    groups: dict[str, Params],
    x: Hidden,
    batch: Batch,
    key: Array | None,
) -> tuple[Array, Array]:
    """This device's share of (sum, weight): the cross-entropy, and each row's router losses times the row's weight."""
    total, weight = transformer_head(config, parallel, groups, x, batch, key)
    if "router_loss" in x:
        weight_B = jnp.sum(batch["weights"], axis=1).astype(x["router_loss"].dtype)
        total += jnp.sum(x["router_loss"] * weight_B)
    return total, weight


def traffic(
    config: MoEConfig,
    parallel: ParallelContext,
    part: str,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    dtype: str,
    platform: str,
) -> Traffic:
    """What one call of "embed", "block" or "head" moves, for the per-device shapes of a batch."""
    if part != "block":
        return transformer_traffic(config, parallel, part, shapes, dtype, platform)
    rows, length = shapes["inputs"].shape
    residual = residual_bytes(config, parallel, shapes, dtype, platform)
    attention = attention_traffic(config, parallel, rows, length, residual, dtype, platform)
    around = around_products(parallel, residual, ring=False)
    choices = (Collective("all-gather", (context.AXIS,), 1, rows * length * config.top_k * 4),)
    choices = choices if gathers_choices(config, parallel) else ()
    buffer = _buffer(config, parallel, rows=rows, held=length // parallel.context.size)
    moved = expert.traffic(buffer, width=config.width, dtype=dtype, platform=platform)
    forward = (*choices, *moved.forward)
    return attention.and_then(Traffic((*around, *forward), (*around, *moved.backward), (*around[:1], *forward)))
