"""What a model is told of the mesh: the axes that it splits its own work over. An argument, never an ambient global."""

from dataclasses import dataclass, field
from typing import NamedTuple

from jax import Array, lax

from .. import tensor
from ..collectives import Collective
from ..context import ContextConfig, local_positions
from ..expert import ExpertConfig
from ..tensor import TensorConfig


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Options, with sizes worked out, of the strategies that live inside a model; the default splits nothing.

    Attributes:
        tensor: products of matrices and positions between them, see `tensor.py`.
        context: positions of a row, see `context.py`.
        expert: experts of a mixture, see `expert.py`.
    """

    tensor: TensorConfig = field(default_factory=TensorConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    expert: ExpertConfig = field(default_factory=ExpertConfig)

    @property
    def splits_anything(self) -> bool:
        """Whether a model has any work to split."""
        return self.tensor.size * self.context.size * self.expert.size > 1

    @property
    def rings(self) -> tuple[str, ...]:
        """The options that send to neighbours, see `xla/neighbours.py`."""
        context, tensor = self.context, self.tensor
        attention = context.size > 1 and context.attention == "ring" and context.send == "pairs"
        products = tensor.size > 1 and tensor.collective_matmul
        named = {"strategy.context.attention=ring": attention, "strategy.tensor.collective_matmul": products}
        return tuple(name for name, used in named.items() if used)

    @property
    def splits_positions(self) -> bool:
        """Whether a device holds fewer positions than a row has."""
        return self.tensor.size * self.context.size > 1


class Traffic(NamedTuple):
    """What one call of a part of a model (embed, a block, head) moves on each device.

    Attributes:
        forward: collectives of the part itself.
        backward: those of its gradient.
        again: those of `forward` that backward needs once more where it computes the part again.
    """

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    again: tuple[Collective, ...] = ()

    def and_then(self, other: "Traffic") -> "Traffic":
        """What this part and another one move, one after the other."""
        return Traffic(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def held_positions(parallel: Parallel, length: int) -> Array:
    """Positions of a row that this device's `context` group works on, (length / context,) int32, inside `shard_map`."""
    return local_positions(length, parallel.context)


def own_positions(parallel: Parallel, length: int) -> Array:
    """Positions whose activations this device keeps between products: its `tensor` share of `held_positions`.

    Args:
        parallel: The split.
        length: Positions in a whole row.

    Returns:
        (length / (context * tensor),) int32, varying over both axes.
    """
    held = held_positions(parallel, length)
    if parallel.tensor.size == 1:
        return held
    size = held.shape[0] // parallel.tensor.size
    return lax.dynamic_slice_in_dim(held, lax.axis_index(tensor.AXIS) * size, size)
