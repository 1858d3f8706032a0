"""What every library's module becomes: a way to its first arrays, and a way to call it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array

from ...parallel.model import Params


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A module of some library as two pure functions.

    Attributes:
        init: `init(key) -> (params, state)`; the second is () where nothing but parameters is kept. Traced.
        call: `call(params, state, inputs, rows) -> (outputs, next state)`. Traced.
        keeps_state: Whether there is a state.
        name: What reports call it.
    """

    init: Callable[[Array], tuple[Params, Any]]
    call: Callable[[Params, Any, Any, "Rows"], tuple[Any, Any]]
    keeps_state: bool
    name: str


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one device in one call.

    Attributes:
        key: Randomness of this step, the same on every device; None in evaluation.
        example: int32 (rows,), the global index of each row.
        axes: The mesh axes over which the other rows of the batch are; () on one device.
    """

    key: Array | None
    example: Array
    axes: tuple[str, ...]

    @property
    def training(self) -> bool:
        """Whether the module is trained, not evaluated."""
        return self.key is not None
