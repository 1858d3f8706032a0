"""Compares a batch with a weight below 1: sums are divided by the weight of the batch, however small it is.

With weights of at least 1 in every batch, a divisor of max(weight, 1), or of a rounded weight, would be right by
accident.
"""

import numpy as np

from ...layouts.paths import leaves_with_paths
from ..step.state import TrainState
from .case import Case
from .causality import WEIGHTS
from .differences import relative
from .reference import HostBatch
from .result import Measured

LIGHT_WEIGHT = 0.5
"""The sum of the weights of the batch."""


def measure_light_batch(case: Case, state: TrainState) -> Measured | None:
    """Compares loss, weight and gradient norm of the first batch with weights that sum to `LIGHT_WEIGHT`.

    Args:
        case: The training.
        state: The initial state; it is not consumed.

    Returns:
        The first number that differs, or else the largest error; None if the weights are not floating-point numbers, or
        all zero.
    """
    batch = lighten(case.batches[0])
    if batch is None:
        return None
    found, norm = case.sums(state, batch)
    expected = case.one_device.sums(case.params, batch, 0)
    squares = [np.sum(np.square(leaf, dtype=np.float64)) for _, leaf in leaves_with_paths(expected.gradients)]
    expected_norm = float(np.sqrt(sum(squares))) / expected.weight
    errors = {
        "loss": relative(found.total, expected.total),
        "weight": relative(found.weight, expected.weight),
        "gradient norm": relative(norm, expected_norm),
    }
    measured = [Measured(error, case.tolerance, name) for name, error in errors.items()]
    for number in measured:
        if number.differs:
            return number
    return max(measured)


def lighten(batch: HostBatch) -> HostBatch | None:
    """Returns a batch with scaled weights; None if they cannot be scaled."""
    weights = np.asarray(batch.get(WEIGHTS, 0))
    total = float(weights.sum())
    if not np.issubdtype(weights.dtype, np.floating) or not total > 0:
        return None
    return {**batch, WEIGHTS: (weights * (LIGHT_WEIGHT / total)).astype(weights.dtype)}
