"""Sizes and choices of the transformer, and what can be wrong with them."""

from dataclasses import dataclass
from math import inf

from ..mesh.errors import UserError
from ..mesh.shapes import divisors

MOST_PARAMETERS = 10**15
"""A hundred times what the largest models have; the bytes of ten copies still fit 64 bits."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and choices of the transformer."""

    vocabulary: int = 0
    """Number of different tokens; 0 = the data's."""
    length: int = 0
    """Positions in a row, for counting operations; 0 = the data's."""
    layers: int = 4
    """Number of blocks."""
    width: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 0
    """Key-value heads, a divisor of `heads`; 0 = as many as `heads`."""
    head_width: int = 0
    """Width of a head, even; 0 = width / heads."""
    mlp_width: int = 0
    """Width between the two halves of the MLP; 0 = 8/3 of `width`, rounded up to a multiple of 64."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied: bool = False
    """Whether the head reads the embedding table instead of its own matrix."""
    dropout: float = 0.0
    """Part of the values dropped after the embedding and after each half of a block; 0 <= dropout < 1."""
    scan_unroll: int = 1
    """Blocks in one turn of the loop over blocks: more compile longer and may run faster. Where blocks gather or cast
    their parameters, the largest number up to this that divides the layers."""

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise UserError("\n".join(problems))

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads, worked out."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of a head, worked out."""
        return self.head_width or self.width // self.heads

    @property
    def mlp_size(self) -> int:
        """Width of the MLP, worked out."""
        return self.mlp_width or -(-8 * self.width // (3 * 64)) * 64

    @property
    def matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with: all matrices and the head, without the embedding look-up."""
        attention = 2 * self.width * self.head_size * (self.heads + self.num_kv_heads)
        return self.layers * (attention + 3 * self.width * self.mlp_size) + self.width * self.vocabulary

    @property
    def total_parameters(self) -> int:
        """Parameters in all matrices, those of the embedding included."""
        return self.matmul_parameters + self.width * self.vocabulary

    @property
    def flops_per_row(self) -> float:
        """Operations of forward and backward for one row.

        6 * matmul_parameters * L (2 forward, 4 backward) and, for the two products of attention, 12 * N * H * K * L**2:
        the full square of positions, as PaLM counts it (Chowdhery et al. 2022, appendix B), although half of it is
        masked and up to 3/8 is not computed. Neither look-ups, norms and softmax nor recomputation count.
        """
        attention = 12 * self.layers * self.heads * self.head_size * self.length**2
        return float(6 * self.matmul_parameters * self.length + attention)


def _problems(config: TransformerConfig) -> list[str]:
    least = dict.fromkeys(("layers", "width", "heads", "scan_unroll"), 1)
    least |= dict.fromkeys(("vocabulary", "length", "kv_heads", "head_width", "mlp_width"), 0)
    given = {name: getattr(config, name) for name in least}
    problems = [
        f"model.{name}={given[name]} has to be at least {least[name]}." for name in least if given[name] < least[name]
    ]
    if not 0 <= config.dropout < 1:
        problems.append(f"model.dropout={config.dropout} has to be a part of the values: 0 <= dropout < 1.")
    if not 1 < config.rope_base < inf:
        problems.append(f"model.rope_base={config.rope_base} has to be over 1: frequencies fall along a head.")
    if not 0 < config.norm_epsilon < inf:
        problems.append(f"model.norm_epsilon={config.norm_epsilon} has to be over 0.")
    return problems or _head_problems(config) or _total_problems(config)


def _total_problems(config: TransformerConfig) -> list[str]:
    """More parameters than anything could hold: the arithmetic of bytes would run over, here and in XLA."""
    total = config.total_parameters
    if total <= MOST_PARAMETERS:
        return []
    return [
        f"model.width={config.width} makes {total:.3g} parameters, with model.layers={config.layers} and an MLP of "
        f"width {config.mlp_size}; {MOST_PARAMETERS:.0e} are the most. Set model.width, model.mlp_width or "
        "model.layers lower."
    ]


def _head_problems(config: TransformerConfig) -> list[str]:
    """Checks on sizes that are all positive."""
    problems = []
    if config.heads % config.num_kv_heads:
        problems.append(
            f"model.kv_heads={config.kv_heads} does not divide model.heads={config.heads}: each key-value head serves "
            f"equally many query heads. Take one of {divisors(config.heads)}."
        )
    if not config.head_width and config.width % config.heads:
        problems.append(
            f"model.width={config.width} is not divisible by model.heads={config.heads}. "
            "Change one of them or give model.head_width."
        )
    elif config.head_size % 2:
        problems.append(
            f"model.head_width: a head is {config.head_size} wide (model.head_width, or model.width={config.width} / "
            f"model.heads={config.heads}), and rotary positions turn pairs: the width has to be even."
        )
    return problems
