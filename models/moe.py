"""A decoder-only transformer with mixtures of experts as MLPs: `transformer.py` with the second half of a block here.

Letters: as in `transformer.py`, and E experts, e of them on one device, k selected by each position, N = B * L
positions on one device, M places of a buffer. The parameters of a block's second half:

    blocks/mlp/norm     (N, D)              blocks/mlp/gate   (N, E, D, F)
    blocks/mlp/router   (N, D, E)           blocks/mlp/up     (N, E, D, F)
                                            blocks/mlp/down   (N, E, F, D)

Each position goes through the k experts with the highest router scores, on any device (`parallel/expert.py`). In
training, each block adds the router's losses of each row to "router_loss", and the head adds them to the loss, weighted
like the row's positions; evaluation gives the cross-entropy alone.

Everything is counted along one row, on any devices and next to any other rows: selected experts, dropped positions and
the losses are the same on every mesh and in every microbatch. Positions without weight count too. A row's places with
an expert go in the order of positions, at each position the first choice before the second. So no later position
affects whether a position keeps its place, and a trained model can be read from left to right. In the router, L are
the positions of a row on this device's `context` group, and W those of the whole row.

Sources: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Jiang et al. 2024, "Mixtral of Experts" (this
architecture: SwiGLU experts in every block, weights over the selected ones); Lepikhin et al. 2020, "GShard", section
2.2 (capacity in groups; here a group is a row, and places go position by position instead of all first choices
first); Fedus et al. 2021, "Switch Transformers", section 2.2 (auxiliary loss); Zoph et al. 2022, "ST-MoE", section
3.3 (z-loss).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge
from jax import Array, lax

from ..parallel import context, expert, tensor
from ..parallel.blocks.grouped_experts import apply_experts
from ..parallel.collectives import Collective, Traffic, varying_zeros
from ..parallel.model import Batch, BlockModel, ParallelContext, Params
from ..parallel.sharding.parallel_context import held_positions
from ..parallel.xla.platform import overhead_of
from .transformer import WHOLE, Hidden, Transformer
from .transformer_config import Positive, TransformerConfig
from .transformer_split import Rules


@dataclass(frozen=True, kw_only=True)
class MoEConfig(TransformerConfig):
    """A transformer with mixtures of experts as MLPs; `mlp_width` is the width of one expert."""

    experts: Positive = 8
    """Experts in each block, all of `mlp_width`."""
    top_k: Positive = 2
    """Experts that each position selects."""
    capacity_factor: Annotated[float, Ge(0)] = 1.25
    """Positions of a row that an expert takes, in units of its equal share, top_k * length / experts; further ones
    are dropped; 0 = dropless: an expert takes all that select it."""
    auxiliary_loss: Annotated[float, Ge(0)] = 0.01
    """Weight, in training, of the loss of each block that is minimal if experts share the positions equally."""
    z_loss: Annotated[float, Ge(0)] = 0.001
    """Weight, in training, of the squared log of the router's normalizer in each block; keeps its logits small."""

    def problems(self) -> Iterator[str]:
        """Yields the problems of options with each other."""
        yield from super().problems()
        for name, only in {"mlp": "swiglu", "mlp_bias": False, "norm": "rms"}.items():
            if getattr(self, name) != only:
                yield (
                    f"model.{name}={getattr(self, name)} is only for the transformer: experts are swiglu, without "
                    "biases, after an RMSNorm. Leave it out, or set model.name to transformer."
                )
        if self.top_k > self.experts:
            yield f"model.top_k={self.top_k} must be at most model.experts={self.experts}."

    def capacity(self, length: int) -> int:
        """Returns the positions of a row of this length that one expert takes."""
        if not self.capacity_factor:
            return length
        return min(length, ceil(self.top_k * length / self.experts * self.capacity_factor))

    @property
    def drops(self) -> bool:
        """True if experts have a capacity."""
        return self.capacity_factor > 0

    @property
    def mlp_parameters(self) -> int:
        """Parameters of a block's second half that multiply a token: the router and the selected experts."""
        return 3 * self.width * self.mlp_size * self.top_k + self.width * self.experts


class Routing(NamedTuple):
    """The decisions of the router for the positions of a device.

    Attributes:
        expert_BLk: int32, (B, L, k), the selected experts, highest score first.
        gate_BLk: (B, L, k), the weight of each in the result, float32 or wider.
        kept_BLk: bool, (B, L, k), false if the expert is full.
        loss_B: (B,), this device's share of each row's losses, with the weights of the config.
    """

    expert_BLk: Array
    gate_BLk: Array
    kept_BLk: Array
    loss_B: Array


def moe(config: MoEConfig, parallel: ParallelContext = WHOLE) -> BlockModel:
    """Builds the model.

    Args:
        config: Sizes and options, with vocabulary and length.
        parallel: The parallel context, the split of the work over the mesh. By default, nothing is split.

    Returns:
        A language model over the batches of `transformer`; "router_loss" (B,) flows beside "hidden" in training.

    Raises:
        UserError: The vocabulary or the length is still 0, or the mesh does not divide the sizes.
    """
    return MixtureOfExperts(config, parallel).model("moe")


@dataclass(frozen=True)
class MixtureOfExperts(Transformer):
    """The functions of the model that differ from the transformer's."""

    config: MoEConfig

    @property
    def rules(self) -> Rules:
        """The split dims of the parameters: experts over `expert`, their columns over `tensor`."""
        experts = expert.AXIS if self.parallel.expert.size > 1 else None
        columns = tensor.AXIS if self.parallel.tensor.size > 1 else None
        kept = {path: axes for path, axes in super().rules.items() if not path.startswith("blocks/mlp")}
        return {
            **kept,
            "blocks/mlp/(gate|up)": (None, experts, None, columns),
            "blocks/mlp/down": (None, experts, columns, None),
        }

    def _init_mlp(self, key: Array) -> Params:
        D, F, E = self.config.width, self.config.mlp_size, self.config.experts
        return {
            **self._init_norm(),
            "router": self._draw_matrix(key, "mlp/router", (D, E)),
            **{name: self._draw_matrix(key, f"mlp/{name}", (E, D, F)) for name in ("gate", "up")},
            "down": self._draw_matrix(key, "mlp/down", (E, F, D), on_residual=True),
        }

    def embed(self, groups: dict[str, Params], batch: Batch, key: Array | None) -> Hidden:
        """Looks up the tokens; in training, adds a sum of the router's losses for each row, which begins at 0."""
        x = super().embed(groups, batch, key)
        if key is None or not (self.config.auxiliary_loss or self.config.z_loss):
            return x
        wide = jnp.promote_types(x["hidden"].dtype, jnp.float32)
        return {**x, "router_loss": varying_zeros(x["hidden"].shape[:1], wide, x["hidden"])}

    def head(self, groups: dict[str, Params], x: Hidden, batch: Batch, key: Array | None) -> tuple[Array, Array]:
        """Returns this device's share of (sum, weight): the cross-entropy, and each row's router losses times the
        row's weight."""
        total, weight = super().head(groups, x, batch, key)
        if "router_loss" in x:
            weight_B = jnp.sum(batch["weights"], axis=1).astype(x["router_loss"].dtype)
            total += jnp.sum(x["router_loss"] * weight_B)
        return total, weight

    def _mlp(self, params: Params, x_BlD: Array, x: Hidden) -> tuple[Array, Hidden]:
        x_BLD = tensor.gather_positions(self.parallel.tensor, x_BlD)
        routing = self.route(params["router"], x_BLD)
        if "router_loss" in x:
            x = {**x, "router_loss": x["router_loss"] + routing.loss_B}
        x_ND = x_BLD.reshape(-1, x_BLD.shape[2])
        expert_Nk, gate_Nk, kept_Nk = (each.reshape(-1, self.config.top_k) for each in routing[:3])
        placed = expert.placement(self._buffer(*x_BLD.shape[:2]), expert_Nk, kept_Nk)
        x_MD, expert_b = expert.dispatch(placed, x_ND)
        weights = {name: params[name] for name in ("gate", "up", "down")}
        y_NkD = expert.combine(placed, apply_experts(_swiglu, weights, x_MD, expert_b, placed.buffer.expected))
        y_ND = jnp.sum(y_NkD.astype(gate_Nk.dtype) * gate_Nk[:, :, None], axis=1).astype(x_BLD.dtype)
        return tensor.scatter_positions(self.parallel.tensor, y_ND.reshape(x_BLD.shape)), x

    def route(self, router_DE: Array, x_BLD: Array) -> Routing:
        """Selects experts; computed in float32 or wider. Devices along `tensor` route the same positions.

        The probabilities of several experts of a position are scaled to add up to 1; a single expert has its
        probability as weight, because otherwise the router would not get a gradient.

        Args:
            router_DE: (D, E), whole on every device.
            x_BLD: (B, L, D), per-device.
        """
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        logits_BLE = x_BLD.astype(wide) @ router_DE.astype(wide)
        probability_BLE = jax.nn.softmax(logits_BLE, axis=-1)
        gate_BLk, expert_BLk = lax.top_k(probability_BLE, self.config.top_k)
        if self.config.top_k > 1:
            gate_BLk = gate_BLk / jnp.sum(gate_BLk, axis=-1, keepdims=True)
        place_BLk, count_BE = self._places(expert_BLk)
        length = x_BLD.shape[1] * self.parallel.context.size
        kept_BLk = place_BLk < self.config.capacity(length)
        fraction_BE = count_BE.astype(wide) / (self.config.top_k * length)
        loss_B = self._losses(logits_BLE, probability_BLE, fraction_BE, length) / self.parallel.tensor.size
        return Routing(expert_BLk, gate_BLk, kept_BLk, loss_B)

    def _losses(self, logits_BLE: Array, probability_BLE: Array, fraction_BE: Array, length: int) -> Array:
        """Returns this device's share of the losses of each row, (B,).

        The auxiliary loss is E * sum over experts of (fraction of choices) * (mean probability), which is 1 if both
        are equal for all experts; the z-loss is the mean square of the log of the normalizer.
        """
        mean_BE = jnp.sum(probability_BLE, axis=1) / length
        auxiliary_B = self.config.experts * jnp.sum(fraction_BE * mean_BE, axis=-1)
        z_B = jnp.sum(jax.nn.logsumexp(logits_BLE, axis=-1) ** 2, axis=1) / length
        return self.config.auxiliary_loss * auxiliary_B + self.config.z_loss * z_B

    @property
    def _gathers_choices(self) -> bool:
        """True if a device needs the choices of positions on other devices: for places, or for the auxiliary loss."""
        return self.parallel.context.size > 1 and (self.config.drops or self.config.auxiliary_loss > 0)

    def _places(self, expert_BLk: Array) -> tuple[Array, Array]:
        """Returns the number of earlier choices of the same expert in the row, (B, L, k), and the choices per expert,
        (B, E)."""
        whole_BWk = expert_BLk
        if self._gathers_choices:
            gathered_BWk = lax.all_gather(expert_BLk, context.AXIS, axis=1, tiled=True)
            whole_BWk = jnp.take(gathered_BWk, _order_of_gathered(self.parallel, gathered_BWk.shape[1]), axis=1)
        place_Bn, count_BE = expert.places(whole_BWk.reshape(whole_BWk.shape[0], -1), None, self.config.experts)
        place_BWk = place_Bn.reshape(whole_BWk.shape)
        if whole_BWk is expert_BLk:
            return place_BWk, count_BE
        return jnp.take(place_BWk, held_positions(self.parallel, place_BWk.shape[1]), axis=1), count_BE

    def _buffer(self, rows: int, held: int) -> expert.Buffer:
        """Returns the sizes of the buffers for rows with `held` positions each on the device's `context` group."""
        return expert.buffer_of(
            self.parallel.expert,
            overhead_of(self.parallel.platform, self.config.width * self.config.mlp_size / self.parallel.tensor.size),
            experts=self.config.experts,
            top_k=self.config.top_k,
            positions=rows * held,
            limit=rows * min(held, self.config.capacity(held * self.parallel.context.size)),
        )

    def traffic(self, part: str, shapes: Mapping[str, jax.ShapeDtypeStruct], dtype: str, platform: str) -> Traffic:
        """Returns the traffic of one call of "embed", "block" or "head", for the per-device shapes of a batch."""
        if part != "block":
            return super().traffic(part, shapes, dtype, platform)
        rows, length = shapes["inputs"].shape
        attention = self.attention_traffic(rows, length, dtype, platform)
        around = self.around_products(self.residual_bytes(rows, length, dtype, platform), ring=False)
        choices = (Collective("all-gather", (context.AXIS,), 1, rows * length * self.config.top_k * 4),)
        choices = choices if self._gathers_choices else ()
        buffer = self._buffer(rows, length // self.parallel.context.size)
        moved = expert.traffic(buffer, width=self.config.width, dtype=dtype, platform=platform)
        forward = (*choices, *moved.forward)
        return attention.and_then(Traffic((*around, *forward), (*around, *moved.backward), (*around[:1], *forward)))


def _order_of_gathered(parallel: ParallelContext, length: int) -> np.ndarray:
    """Returns the index of position 0, 1, ... of a row in the array gathered from device 0, 1, ... of `context`."""
    config = parallel.context
    chunks = [chunk for rank in range(config.size) for chunk in context.chunks_of(rank, config)]
    positions = np.arange(length).reshape(config.num_chunks, -1)[chunks]
    return np.argsort(positions.reshape(-1))


def _swiglu(weights: Params, x_mD: Array) -> Array:
    """Applies one expert (its columns on this device) to one block of the buffer's places."""
    return (jax.nn.silu(x_mD @ weights["gate"]) * (x_mD @ weights["up"])) @ weights["down"]
