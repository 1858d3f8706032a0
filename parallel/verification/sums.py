"""Results of one device: the sums of a batch, and a few steps."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ..model import Params

HostBatch = Mapping[str, Any]
"""A global batch as host arrays, rows on dim 0."""


class Sums(NamedTuple):
    """One batch on one device.

    Attributes:
        total: Sum of the weighted losses.
        weight: Sum of the weights.
        gradients: Gradients of `total`, a pytree of host arrays.
        metrics: The model's own metrics: name -> (sum, weight).
        state: The model's next state, host arrays; () for a model without state.
    """

    total: float
    weight: float
    gradients: Params
    metrics: Mapping[str, tuple[float, float]] = {}
    state: Any = ()


class Reference(NamedTuple):
    """A few steps on one device.

    Attributes:
        losses: The mean loss of each batch, before its update.
        weights: The weight of each batch.
        norms: The global norm of the gradients of each batch, not clipped.
        gradients: Gradients of the mean loss of the first batch, not clipped: a pytree of host arrays.
        params: The parameters after all steps, a pytree of host arrays.
        opt_state: The optimizer's state after all steps, blocks in the model's order.
        metrics: The means of the model's own metrics for each batch.
        state: The model's state after all steps.
        moved: Training from perturbed parameters, see `rounding.py`; None until it is needed.
    """

    losses: tuple[float, ...]
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: Params
    params: Params
    opt_state: Any
    metrics: tuple[Mapping[str, float], ...] = ()
    state: Any = ()
    moved: "Reference | None" = None


def pairs(metrics: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every pair of a tree of metrics with its full name."""
    for name, value in dict(metrics).items():
        if isinstance(value, Mapping):
            yield from pairs(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def on_host(metrics: Any) -> dict[str, tuple[float, float]]:
    """Converts metrics to host numbers."""
    return {name: (float(total), float(weight)) for name, (total, weight) in metrics.items()}


def added(found: Sums, new: Sums) -> Sums:
    """Adds the sums of two microbatches."""
    if found.gradients is None:
        return new
    gradients = jax.tree.map(np.add, found.gradients, new.gradients)
    metrics = {
        name: (total + found.metrics[name][0], weight + found.metrics[name][1])
        for name, (total, weight) in new.metrics.items()
    }
    return Sums(found.total + new.total, found.weight + new.weight, gradients, metrics)
