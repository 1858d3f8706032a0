"""Does a language model see the future? Later tokens change, and the losses of earlier positions have to stay.

A batch is that of a language model that reads from left to right where its targets are its inputs, shifted by one. With
weights at positions up to p alone, every token after p is replaced: a loss that is another one then saw one of them.
Losses that change by the same at every position share a term that belongs to the row, as a router's does: that is no
prediction, and is told apart.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .differences import relative
from .reference import HostBatch

INPUTS, TARGETS, WEIGHTS = "inputs", "targets", "weights"
MOST_POSITIONS = 8
SharedLoss = Callable[[HostBatch], float]
"""A batch -> the sum of its losses, on one device."""


class Future(NamedTuple):
    """What was found.

    Attributes:
        positions: p of each trial.
        seen: p and the relative change of the losses up to p, of the trial that changed most; None where none did.
        shared: whether a term that all positions of a row share changed.
        untried: why nothing was tried; "" where it was.
    """

    positions: tuple[int, ...] = ()
    seen: tuple[int, float] | None = None
    shared: bool = False
    untried: str = ""


def look_ahead(loss: SharedLoss, batch: HostBatch, tolerance: float) -> Future:
    """Changes later tokens and compares the losses before them.

    Args:
        loss: The model's loss on one device, always of the same parameters and random numbers.
        batch: A global batch.
        tolerance: The relative change that is rounding.
    """
    reason = _unlike_language(batch)
    if reason:
        return Future(untried=reason)
    if relative(loss({**batch, TARGETS: _others(batch[TARGETS], 0)}), loss(batch)) <= tolerance:
        return Future(untried="the loss does not read the targets")
    length = batch[INPUTS].shape[1]
    positions = sorted({int(each) for each in np.linspace(0, length - 2, min(length - 1, MOST_POSITIONS))})
    changes: dict[int, float] = {}
    shared = False
    for position in positions:
        before, after = _until(batch, position), _until({**batch, INPUTS: _after(batch, position)}, position)
        change = relative(loss(after), loss(before))
        if change <= tolerance:
            continue
        if _is_shared(loss, batch, position, tolerance):
            shared = True
        else:
            changes[position] = change
    if shared:
        changes.pop(0, None)  # one position alone cannot tell whether it shares the change; position 1 has told
    worst = max(changes.items(), key=lambda item: item[1], default=None)
    return Future(tuple(positions), worst, shared)


def _unlike_language(batch: HostBatch) -> str:
    """Why a batch is not that of a language model that reads from left to right; "" where it is."""
    arrays = [batch.get(name) for name in (INPUTS, TARGETS, WEIGHTS)]
    if any(array is None or np.ndim(array) != 2 for array in arrays):
        return "the batch holds no inputs, targets and weights of every position"
    inputs, targets, weights = (np.asarray(array) for array in arrays)
    if not inputs.shape == targets.shape == weights.shape or inputs.dtype.kind not in "iu" or inputs.shape[1] < 2:
        return "the inputs are no rows of tokens with a target each"
    counts = weights[:, :-1] > 0
    shifted = targets[:, :-1] == inputs[:, 1:]
    if not counts.any() or not shifted[counts].all() or np.ptp(inputs) == 0:
        return "the targets are not the inputs shifted by one"
    return ""


def _others(tokens: Any, first: int) -> np.ndarray:
    """Tokens of which those from `first` on are replaced, each by another one between the least and the greatest."""
    tokens = np.array(tokens)
    least, count = tokens.min(), int(np.ptp(tokens)) + 1
    shift = 1 + np.arange(tokens.shape[1] - first) % max(count - 1, 1)
    tokens[:, first:] = least + (tokens[:, first:].astype(np.int64) - least + shift) % count
    return tokens


def _after(batch: HostBatch, position: int) -> np.ndarray:
    return _others(batch[INPUTS], position + 1)


def _until(batch: HostBatch, position: int) -> HostBatch:
    weights = np.array(batch[WEIGHTS])
    weights[:, position + 1 :] = 0
    return {**batch, WEIGHTS: weights}


def _is_shared(loss: SharedLoss, batch: HostBatch, position: int, tolerance: float) -> bool:
    """Whether the losses of two positions change by just the same, counted one at a time with weights of 1."""
    places = sorted({position, position // 2, 0})
    if len(places) < 2:
        return False
    changes, sizes = zip(*(_change(loss, batch, position, place) for place in places), strict=True)
    return float(np.ptp(changes)) <= tolerance * max(sizes)


def _change(loss: SharedLoss, batch: HostBatch, position: int, place: int) -> tuple[float, float]:
    """By how much the loss of one position changes with the tokens after another, and how large it is."""
    weights = np.zeros_like(batch[WEIGHTS])
    weights[:, place] = 1
    alone = {**batch, WEIGHTS: weights}
    before = loss(alone)
    return loss({**alone, INPUTS: _after(batch, position)}) - before, abs(before)
