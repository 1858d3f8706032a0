"""The state of a training run: one pytree, one snapshot of everything that changes."""

from typing import Any, NamedTuple

from jax import Array

from .model import Params


class TrainState(NamedTuple):
    """Everything that changes from step to step.

    Attributes:
        step: int32 scalar, the number of optimizer steps done, on every device. The position in the data follows from
            it: step s starts at sample s * global_batch.
        params: The parameters, laid out by the layout table, in the stored dtype.
        opt_state: The optimizer's state; each moment laid out as its parameter.
        key: uint32 (2,), raw data of the run's random key, on every device; it does not change, the step is folded in.
    """

    step: Array
    params: Params
    opt_state: Any
    key: Array
