"""Sizes and options of the transformer, and their checks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from ..mesh.axes import divisors
from ..mesh.errors import raise_problems
from ..parallel.options import type_problems

Positive = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and options of the transformer."""

    vocabulary: Count = 0
    """Number of different tokens; 0 = the data's."""
    length: Count = 0
    """Positions in a row, for counting operations; 0 = the data's."""
    layers: Positive = 4
    """Number of blocks."""
    width: Positive = 128
    """Width of the residual stream."""
    heads: Positive = 4
    """Query heads."""
    kv_heads: Count = 0
    """Key-value heads, a divisor of `heads`; 0 = as many as `heads`."""
    head_width: Count = 0
    """Width of a head, even with rotary positions; 0 = width / heads."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """The second half of a block: `swiglu` has a gate, `gelu` two matrices with GELU (by its tanh) between them."""
    mlp_width: Count = 0
    """Width between the two halves of the MLP; 0 = 8/3 of `width`, rounded up to a multiple of 64 (`swiglu`), or
    4 x `width` (`gelu`)."""
    mlp_bias: bool = False
    """Add biases to the matrices of the MLP."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention on one device: `cudnn` (fused, for 16-bit numbers on NVIDIA GPUs), `xla` (any platform), or `auto`
    (cudnn on GPUs if it supports the sizes and the dtype)."""
    attention_bias: Literal["none", "inputs", "all"] = "none"
    """The matrices of attention that have biases: `inputs` are query, key and value, `all` the output matrix too."""
    head_norm: bool = False
    """Apply an RMSNorm to each head of query and key before the rotation."""
    positions: Literal["rotary", "learned"] = "rotary"
    """The encoding of positions: `rotary` rotates query and key, `learned` adds a row of a table to the embedding."""
    max_length: Count = 0
    """Rows of the table of learned positions; with rotary positions, only the longest row that config.json of Hugging
    Face states; 0 = `length`."""
    rope_base: Annotated[float, Gt(1)] = 10000.0
    """Base of the rotary frequencies."""
    rope_factor: Annotated[float, Ge(1)] = 1.0
    """The divisor of rotary frequencies, for rows longer than those a model was first trained on; 1 = none."""
    rope_trained_length: Count = 0
    """With `rope_factor`, the length of the first training, which sets the factor of each frequency; 0 = the
    same for all."""
    rope_slow_turns: Annotated[float, Gt(0)] = 1.0
    """With `rope_trained_length`, frequencies with fewer turns in such a row are divided by the whole factor."""
    rope_fast_turns: float = 4.0
    """With `rope_trained_length`, frequencies with more turns do not change; between the two limits, in part."""
    norm: Literal["rms", "layer"] = "rms"
    """`rms` divides by the root mean square and scales; `layer` subtracts the mean first and adds a bias."""
    norm_epsilon: Annotated[float, Gt(0)] = 1e-5
    """Added to the mean square, or to the variance, in a norm."""
    tied: bool = False
    """The head reads the embedding table instead of its own matrix."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Fraction of the values dropped after the embedding and after each half of a block; 0 <= dropout < 1."""
    scan_unroll: Positive = 1
    """Blocks in one iteration of the loop over blocks: more compile longer and may run faster. If blocks gather or cast
    their parameters, the largest number up to this that divides the layers."""

    def __post_init__(self) -> None:
        raise_problems(type_problems("model", self) or self.problems())

    def problems(self) -> Iterator[str]:
        """Yields the problems of options with each other."""
        if self.rope_slow_turns >= self.rope_fast_turns:
            yield (
                f"model.rope_slow_turns={self.rope_slow_turns} must be less than "
                f"model.rope_fast_turns={self.rope_fast_turns}."
            )
        if self.positions == "learned" and 0 < self.max_length < self.length:
            yield (
                f"model.max_length={self.max_length} is less than the {self.length} positions of a row: each needs a "
                f"row of the table. Set data.length to at most {self.max_length}, or model.max_length higher."
            )
        if self.heads % self.num_kv_heads:
            yield (
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}: each key-value head serves "
                f"equally many query heads. Use one of {divisors(self.heads)}."
            )
        if not self.head_width and self.width % self.heads:
            yield (
                f"model.width={self.width} is not divisible by model.heads={self.heads}. "
                "Change one of them or give model.head_width."
            )
        elif self.head_size % 2 and self.positions == "rotary":
            yield (
                f"model.head_width: a head is {self.head_size} wide (model.head_width, or model.width={self.width} / "
                f"model.heads={self.heads}), and rotary positions rotate pairs: the width must be even."
            )

    @property
    def num_kv_heads(self) -> int:
        """The number of key-value heads."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """The width of a head."""
        return self.head_width or self.width // self.heads

    @property
    def mlp_size(self) -> int:
        """The width of the MLP."""
        return self.mlp_width or (4 * self.width if self.mlp == "gelu" else -(-8 * self.width // (3 * 64)) * 64)

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions; 0 without a table."""
        return (self.max_length or self.length) if self.positions == "learned" else 0

    @property
    def matmul_parameters(self) -> int:
        """Parameters that multiply every token: all matrices and the head, without the embedding lookup."""
        attention = 2 * self.width * self.head_size * (self.heads + self.num_kv_heads)
        return self.layers * (attention + self.mlp_parameters) + self.width * self.vocabulary

    @property
    def mlp_parameters(self) -> int:
        """Parameters of a block's second half that multiply every token."""
        return (2 if self.mlp == "gelu" else 3) * self.width * self.mlp_size

    @property
    def flops_per_row(self) -> float:
        """Operations of forward and backward for one row of `length` positions."""
        return self.flops_of_length(self.length)

    def flops_of_length(self, length: int) -> float:
        """Returns the operations of forward and backward for one row of L positions.

        6 * matmul_parameters * L (2 forward, 4 backward) and, for the two products of attention, 12 * N * H * K * L**2:
        the full square of positions, as in PaLM (Chowdhery et al. 2022, appendix B), although half of it is masked and
        up to 3/8 is not computed. Lookups, norms, softmax and recomputation do not count.
        """
        attention = 12 * self.layers * self.heads * self.head_size * length**2
        return float(6 * self.matmul_parameters * length + attention)
