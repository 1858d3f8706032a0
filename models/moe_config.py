"""Sizes and choices of the mixture-of-experts transformer, and what can be wrong with them."""

from dataclasses import dataclass
from math import ceil, inf

from ..mesh.errors import UserError
from .transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class MoEConfig(TransformerConfig):
    """A transformer whose MLPs are mixtures of experts; `mlp_width` is the width of one expert."""

    experts: int = 8
    """Experts in each block, all of `mlp_width`."""
    top_k: int = 2
    """Experts that each position chooses."""
    capacity_factor: float = 1.25
    """Positions of a row that an expert takes, in units of its equal share, top_k * length / experts; what exceeds them
    is dropped; 0 = dropless: an expert takes all that choose it."""
    auxiliary_loss: float = 0.01
    """Weight, in training, of the loss of each block that is least where experts share the positions equally."""
    z_loss: float = 0.001
    """Weight, in training, of the squared log of the router's normaliser in each block; it keeps its logits small."""

    def __post_init__(self) -> None:
        problems = _problems(self)
        try:
            super().__post_init__()
        except UserError as error:
            problems.insert(0, str(error))
        if problems:
            raise UserError("\n".join(problems))

    def capacity(self, length: int) -> int:
        """Positions of a row of this length that one expert takes."""
        if not self.capacity_factor:
            return length
        return min(length, ceil(self.top_k * length / self.experts * self.capacity_factor))

    @property
    def drops(self) -> bool:
        """Whether there is a limit to what an expert takes."""
        return self.capacity_factor > 0

    @property
    def matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with: of the experts, the chosen ones; and the router."""
        attention = 2 * self.width * self.head_size * (self.heads + self.num_kv_heads)
        experts = 3 * self.width * self.mlp_size * self.top_k + self.width * self.experts
        return self.layers * (attention + experts) + self.width * self.vocabulary

    @property
    def total_parameters(self) -> int:
        """Parameters in all matrices, those of all experts and of the embedding included."""
        others = 3 * self.width * self.mlp_size * (self.experts - self.top_k)
        return self.matmul_parameters + self.layers * others + self.width * self.vocabulary


def _problems(config: MoEConfig) -> list[str]:
    own = {"mlp": "swiglu", "mlp_bias": False, "norm": "rms"}
    problems = [
        f"model.{name}={getattr(config, name)} is for the transformer: experts are swiglu, without biases, behind an "
        f"RMSNorm. Leave it out, or set model.name to transformer."
        for name, only in own.items()
        if getattr(config, name) != only
    ]
    if config.experts < 1:
        problems.append(f"model.experts={config.experts} has to be at least 1.")
    elif not 1 <= config.top_k <= config.experts:
        problems.append(
            f"model.top_k={config.top_k}: a position chooses different experts, at least 1 and at most all "
            f"model.experts={config.experts} of them."
        )
    for name in ("capacity_factor", "auxiliary_loss", "z_loss"):
        if not 0 <= getattr(config, name) < inf:
            problems.append(f"model.{name}={getattr(config, name)} has to be at least 0 and finite.")
    return problems
