"""The work and the memory of a model that is not one of our transformers, from its traced programs.

The closed form needs both for every number of rows that a candidate gives to a device at once. Products and activations
grow linearly with the rows, and tracing a large model takes seconds: so the programs are traced for the first two
numbers of rows, and all others are on the line through them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np

from ..configs.schema import Config
from ..data.batches import abstract_batch
from ..data.splits import Splits
from ..mesh.devices import list_devices
from ..mesh.errors import UserError, docs_url
from ..parallel.model import BlockModel, Model
from ..parallel.model.user_errors import describe_error
from ..parallel.sharding.loss_work import loss_work
from ..parallel.sharding.model_errors import ModelError, check_loss
from ..parallel.sharding.strategies import read_strategy
from ..parallel.step.model_functions import MESH_ERRORS
from ..parallel.xla.program_work import Work
from ..runtime.build_run import plan_step
from .memory import step_peak

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""The axes of a searched mesh, in its order: the slowest network first."""
CARD = "h100"
"""The kind of device that a step is traced for; which GPU does not matter."""


class StepMemory(NamedTuple):
    """The temporaries of a step on a device that holds all parameters, without its state, in bytes.

    Attributes:
        gradients: Gradients that a loop over blocks stacks.
        others: Activations, other gradients, parameters in the compute dtype, and working memory.
    """

    gradients: float
    others: float


@dataclass
class Line:
    """A function of the rows of a device, evaluated for the first two numbers of rows and linear for others.

    Attributes:
        evaluate: Rows -> numbers.
        known: Rows -> the numbers that it returned.
    """

    evaluate: Callable[[int], Sequence[float]]
    known: dict[int, Sequence[float]] = field(default_factory=dict)

    def __call__(self, rows: int) -> list[float]:
        """Returns the numbers for some rows, each at least 0."""
        if rows not in self.known and len(self.known) < 2:
            self.known[rows] = self.evaluate(rows)
        if rows in self.known:
            return list(self.known[rows])
        (first, before), (second, after) = self.known.items()
        share = (rows - first) / (second - first)
        pairs = zip(before, after, strict=True)
        return [max(low + share * (high - low), 0.0) for low, high in pairs]


class OwnModel:
    """The work and the memory of one model, which are traced when they are asked for."""

    def __init__(self, config: Config, model: Model | BlockModel, splits: Splits, devices: int) -> None:
        """Traces nothing yet.

        Args:
            config: The run's configuration; its strategy does not matter.
            model: Its model.
            splits: Its examples.
            devices: The devices that rows are split over.
        """
        self._devices = max(devices, 2)  # with one, no part of a step runs per device
        self._config = config
        self._model = model
        self._splits = splits
        self._work = Line(self._trace_loss)
        self._memory: dict[str, Line] = {}

    @cached_property
    def is_stacked(self) -> bool:
        """True if the runtime gathers, recomputes and reduces one block of the model at a time."""
        return isinstance(self._model, BlockModel)

    def work(self, rows: int) -> Work:
        """Returns the work of the loss and its gradients for some rows on one device.

        Raises:
            UserError: The model has operations that cannot be counted, and does not state `flops_per_row`.
        """
        forward, backward, touched, products = self._work(rows)
        return Work(forward, backward, touched, products)

    def memory(self, rows: int, remat: str) -> StepMemory:
        """Returns the temporaries of a step on a device that holds all parameters.

        Args:
            rows: The rows of the device.
            remat: `train.remat`.
        """
        if remat not in self._memory:
            self._memory[remat] = Line(lambda number: self._trace_step(number, remat))
        return StepMemory(*self._memory[remat](rows))

    def _trace_loss(self, rows: int) -> Sequence[float]:
        batch = self._rows_of_a_device(rows)
        axes = dict.fromkeys(AXES, 1) | {"data": self._devices}
        work = loss_work(self._model, batch, self._config.precision, axes)
        if work.uncounted:
            self._check(batch)
        return self._complete(rows, work)

    def _rows_of_a_device(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        example = {**self._splits.train[0], "example": np.int32(0)}
        return {
            name: jax.ShapeDtypeStruct((rows, *np.shape(value)), jax.dtypes.canonicalize_dtype(value.dtype))
            for name, value in example.items()
        }

    def _check(self, batch: dict[str, jax.ShapeDtypeStruct]) -> None:
        """Raises the error of the model's own code, unless it is one of a model that needs its mesh."""
        try:
            precision = self._config.precision
            check_loss(self._model, batch, compute=precision.compute, stored=precision.params)
        except ModelError as error:
            cause = error.__cause__
            if cause is None or not any(word in describe_error(cause) for word in MESH_ERRORS):
                raise

    def _complete(self, rows: int, work: Work) -> Sequence[float]:
        """Returns the sums of the work, with the operations that the model states."""
        stated = self._model.flops_per_row
        if stated is not None:
            forward = stated * rows / 3
            return (forward, 2 * forward, work.touched, work.products)
        if work.uncounted:
            raise UserError(
                f"strategies cannot be ranked: the model {self._model.name} has {work.uncounted[0]}, whose operations "
                "cannot be counted in its traced loss, and a ranking without them would be by traffic alone. State "
                f"the model's `flops_per_row` ({docs_url('models', 'model-flops')}), or choose the strategy yourself."
            )
        return work[:4]

    def _trace_step(self, rows: int, remat: str) -> Sequence[float]:
        number = self._devices
        train = replace(self._config.train, accumulate=1, global_batch=number * rows, remat=remat)
        config = replace(self._config, strategy=read_strategy({"data": number}), train=train)
        layouts, step = plan_step(config, self._model, list_devices(target=f"{CARD}:{number}x1"))
        example = self._splits.train[0]
        batch = abstract_batch([example], number * rows, layouts.batch_sharding(abstract=True))
        try:
            peak = step_peak(step, batch)
        except Exception:
            self._check(self._rows_of_a_device(rows))
            raise
        return (peak["gradients"], peak.total() - peak["gradients"])
