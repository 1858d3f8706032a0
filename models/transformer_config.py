"""Sizes and options of the transformer, and their checks."""

from dataclasses import dataclass
from math import inf
from typing import Literal, get_args, get_origin, get_type_hints

from ..mesh.axes import divisors
from ..mesh.errors import UserError, did_you_mean

MAX_PARAMETERS = 10**15
"""A hundred times as many as the largest models have; the bytes of ten copies still fit 64 bits."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and options of the transformer."""

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
    """Width of a head, even with rotary positions; 0 = width / heads."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """The second half of a block: `swiglu` has a gate, `gelu` two matrices with GELU (by its tanh) between them."""
    mlp_width: int = 0
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
    max_length: int = 0
    """Rows of the table of learned positions; 0 = `length`."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    rope_factor: float = 1.0
    """The divisor of rotary frequencies, for rows longer than those a model was first trained on; 1 = none."""
    rope_trained_length: int = 0
    """With `rope_factor`, the length of the first training, which sets the factor of each frequency; 0 "
    "= all the same."""
    rope_slow_turns: float = 1.0
    """With `rope_trained_length`, frequencies with fewer turns in such a row are divided by the whole factor."""
    rope_fast_turns: float = 4.0
    """With `rope_trained_length`, frequencies with more turns do not change; between the two limits, in part."""
    norm: Literal["rms", "layer"] = "rms"
    """`rms` divides by the root mean square and scales; `layer` subtracts the mean first and adds a bias."""
    norm_epsilon: float = 1e-5
    """Added to the mean square, or to the variance, in a norm."""
    tied: bool = False
    """The head reads the embedding table instead of its own matrix."""
    dropout: float = 0.0
    """Fraction of the values dropped after the embedding and after each half of a block; 0 <= dropout < 1."""
    scan_unroll: int = 1
    """Blocks in one iteration of the loop over blocks: more compile longer and may run faster. If blocks gather or cast
    their parameters, the largest number up to this that divides the layers."""

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise UserError("\n".join(problems))

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
        matrices = 2 if self.mlp == "gelu" else 3
        return self.layers * (attention + matrices * self.width * self.mlp_size) + self.width * self.vocabulary

    @property
    def total_parameters(self) -> int:
        """Parameters in all matrices, with the embedding."""
        return self.matmul_parameters + self.width * (self.vocabulary + self.position_rows)

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


def _problems(config: TransformerConfig) -> list[str]:
    least = dict.fromkeys(("layers", "width", "heads", "scan_unroll"), 1)
    zero = ("vocabulary", "length", "kv_heads", "head_width", "mlp_width", "max_length", "rope_trained_length")
    least |= dict.fromkeys(zero, 0)
    given = {name: getattr(config, name) for name in least}
    problems = [
        f"model.{name}={given[name]} must be at least {least[name]}." for name in least if given[name] < least[name]
    ]
    if not 0 <= config.dropout < 1:
        problems.append(f"model.dropout={config.dropout} must be a fraction of the values: 0 <= dropout < 1.")
    if not 1 < config.rope_base < inf:
        problems.append(f"model.rope_base={config.rope_base} must be over 1: frequencies fall along a head.")
    if not 0 < config.norm_epsilon < inf:
        problems.append(f"model.norm_epsilon={config.norm_epsilon} must be over 0.")
    problems += [*_choice_problems(config), *_position_problems(config)]
    return problems or _head_problems(config) or _total_problems(config)


def _choice_problems(config: TransformerConfig) -> list[str]:
    """Returns problems with options that are one of several strings."""
    hints = get_type_hints(type(config))
    words = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    return [
        f"model.{name}={given!r} is not a valid choice.{did_you_mean(given, known, otherwise='Choose from')}"
        for name, known in words.items()
        if (given := getattr(config, name)) not in known
    ]


def _position_problems(config: TransformerConfig) -> list[str]:
    """Returns problems with the options of positions."""
    problems = []
    if not 1 <= config.rope_factor < inf:
        problems.append(f"model.rope_factor={config.rope_factor} must be at least 1: it slows rotations down.")
    if not 0 < config.rope_slow_turns < config.rope_fast_turns < inf:
        problems.append(
            f"model.rope_slow_turns={config.rope_slow_turns} must be over 0 and less than "
            f"model.rope_fast_turns={config.rope_fast_turns}."
        )
    if config.positions == "learned" and 0 < config.max_length < config.length:
        problems.append(
            f"model.max_length={config.max_length} is less than the {config.length} positions of a row: each needs a "
            f"row of the table. Set data.length to at most {config.max_length}, or model.max_length higher."
        )
    return problems


def _total_problems(config: TransformerConfig) -> list[str]:
    """Returns a problem if the parameters are so many that the number of bytes would overflow, here and in XLA."""
    total = config.total_parameters
    if total <= MAX_PARAMETERS:
        return []
    return [
        f"model.width={config.width} makes {total:.3g} parameters, with model.layers={config.layers} and an MLP of "
        f"width {config.mlp_size}; the maximum is {MAX_PARAMETERS:.0e}. Set model.width, model.mlp_width or "
        "model.layers lower."
    ]


def _head_problems(config: TransformerConfig) -> list[str]:
    """Returns problems with the sizes of heads, which are all positive."""
    problems = []
    if config.heads % config.num_kv_heads:
        problems.append(
            f"model.kv_heads={config.kv_heads} does not divide model.heads={config.heads}: each key-value head serves "
            f"equally many query heads. Use one of {divisors(config.heads)}."
        )
    if not config.head_width and config.width % config.heads:
        problems.append(
            f"model.width={config.width} is not divisible by model.heads={config.heads}. "
            "Change one of them or give model.head_width."
        )
    elif config.head_size % 2 and config.positions == "rotary":
        problems.append(
            f"model.head_width: a head is {config.head_size} wide (model.head_width, or model.width={config.width} / "
            f"model.heads={config.heads}), and rotary positions rotate pairs: the width must be even."
        )
    return problems
