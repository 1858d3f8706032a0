"""A training under a strategy and the same training on one device, for comparing them and for repeating parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from ...layouts.tensor_layout import TensorLayout
from ..model import Params
from ..model.user_errors import describe_error
from ..sharding.stored_order import stored_order
from ..step.state import TrainState
from ..step.train_step import Step
from .contract.breaches import Breach, breaches
from .reference import HostBatch, OneDevice, Sums

SHOWN_BY_BATCHES = ("dead", "future")
"""The breaches that a verification finds and reports with whole batches."""


class Contract(NamedTuple):
    """The result of checking a model's contract.

    Attributes:
        breaches: The breaches.
        untried: The reason if the contract was not checked, or "".
    """

    breaches: tuple[Breach, ...] = ()
    untried: str = ""

    @property
    def text(self) -> str:
        """The breaches as an explanation of a difference; "" if there are none."""
        if not self.breaches:
            return ""
        texts = " Besides, ".join(breach.message for breach in self.breaches)
        return f"The model, not the strategy: on one device as well, {texts}"


@dataclass(frozen=True)
class Case:
    """A training under a strategy, and the same training on one device.

    Attributes:
        step: The step of the strategy.
        one_device: The one device.
        params: The initial parameters of both: host arrays, blocks in the model's order.
        batches: One batch for each step.
        clip_norm: The maximum gradient norm of the step.
        tolerance: The tolerance of a loss and its gradients.
        params_tolerance: The tolerance of parameters after some steps.
    """

    step: Step
    one_device: OneDevice
    params: Params
    batches: Sequence[HostBatch]
    clip_norm: float
    tolerance: float
    params_tolerance: float

    @cached_property
    def contract(self) -> Contract:
        """The model's contract on a few rows of all batches, on one device; it affects every strategy."""
        rows = {name: np.concatenate([batch[name] for batch in self.batches]) for name in self.batches[0]}
        try:
            found = breaches(self.one_device.model, self.params, rows, self.one_device.key(0))
        except Exception as error:  # the model may not accept so few rows
            return Contract(untried=f"a few rows of one device raise {describe_error(error)}")
        return Contract(tuple(breach for breach in found if breach.kind not in SHOWN_BY_BATCHES))

    def layout(self, path: str) -> TensorLayout:
        """Returns the layout of the gradient and the update of one parameter."""
        return next(row.layout for row in self.step.plan.update_table.rows if row.path == path)

    def in_model_order(self, params: Params) -> Params:
        """Returns parameters or gradients of the strategy with their blocks in the model's order."""
        return stored_order(self.step.plan).to_model(params)

    def sums(self, state: TrainState, batch: HostBatch) -> tuple[Sums, float]:
        """Returns the sums of one batch under the strategy, without clipping, and the norm of the mean gradient.

        Args:
            state: The state; it is not consumed.
            batch: A global batch.

        Returns:
            The sums, their gradients as arrays on the mesh with blocks in the model's order, and the norm.
        """
        gradients, metrics = self.step.gradients(state, dict(batch))
        weight, norm = float(metrics.weight), float(metrics.grad_norm)
        factor = (weight or 1.0) * (norm / self.clip_norm if 0 < self.clip_norm < norm else 1.0)

        def scale(gradients: Any, factor: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), gradients)

        shardings = self.step.plan.update_table.shardings()
        scaled = jax.jit(scale, out_shardings=shardings)(gradients, np.float64(factor))
        return Sums(float(metrics.loss) * (weight or 1.0), weight, self.in_model_order(scaled)), norm
