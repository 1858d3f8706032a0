"""Checks causality: changed later tokens must not change the losses of earlier positions.

A batch belongs to an autoregressive language model if its targets are its inputs, shifted by one. With weights only at
positions up to p, every token after p is replaced: a loss that changes depends on one of them. If the losses of all
positions change by the same amount, they share a term of the whole row, such as a router loss. This is not a leak and
is reported separately.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .differences import relative
from .reference import HostBatch

INPUTS, TARGETS, WEIGHTS = "inputs", "targets", "weights"
MAX_POSITIONS = 8
SharedLoss = Callable[[HostBatch], float]
"""A batch -> the sum of its losses, on one device."""


class Future(NamedTuple):
    """The result of the causality check.

    Attributes:
        positions: The position p of each trial.
        seen: p and the relative change of the losses up to p, for the trial that changed most; None if none did.
        shared: True if a term that all positions of a row share changed.
        untried: The reason for skipping the check; "" if it ran.
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
    reason = _language_problem(batch)
    if reason:
        return Future(untried=reason)
    if relative(loss({**batch, TARGETS: _replace_tokens(batch[TARGETS], 0)}), loss(batch)) <= tolerance:
        return Future(untried="the loss does not read the targets")
    length = batch[INPUTS].shape[1]
    positions = sorted({int(each) for each in np.linspace(0, length - 2, min(length - 1, MAX_POSITIONS))})
    changes: dict[int, float] = {}
    shared = False
    for position in positions:
        before = reweighted(batch, np.s_[:, position + 1 :], 0)
        change = relative(loss({**before, INPUTS: _replace_tokens(batch[INPUTS], position + 1)}), loss(before))
        if change <= tolerance:
            continue
        if _is_shared(loss, batch, position, tolerance):
            shared = True
        else:
            changes[position] = change
    if shared:
        changes.pop(0, None)  # position 0 alone cannot show if the change is shared; position 1 has shown it
    worst = max(changes.items(), key=lambda item: item[1], default=None)
    return Future(tuple(positions), worst, shared)


def may_look_ahead(loss: SharedLoss, batch: HostBatch, tolerance: float) -> bool:
    """Returns True if other tokens after one position change the losses up to it, for a batch of a language model.

    Two calls of the loss, against up to 18 of `look_ahead`, which finds out if it is a leak.

    Args:
        loss: See `look_ahead`.
        batch: A batch.
        tolerance: The relative change that is rounding.
    """
    if _language_problem(batch):
        return False
    position = (batch[INPUTS].shape[1] - 2) // 4 * 2  # even: never the last of a chunk of an even length
    before = reweighted(batch, np.s_[:, position + 1 :], 0)
    after = {**before, INPUTS: _replace_tokens(batch[INPUTS], position + 1)}
    return relative(loss(after), loss(before)) > tolerance


def _language_problem(batch: HostBatch) -> str:
    """Returns why a batch is not from an autoregressive language model; "" if it is."""
    inputs, targets, weights = (np.asarray(batch.get(name)) for name in (INPUTS, TARGETS, WEIGHTS))
    if not inputs.shape == targets.shape == weights.shape or inputs.ndim != 2 or inputs.dtype.kind not in "iu":
        return "the batch lacks inputs, targets and weights for every position"
    counts = weights[:, :-1] > 0
    shifted = targets[:, :-1] == inputs[:, 1:]
    if not counts.any() or not shifted[counts].all() or np.ptp(inputs) == 0:
        return "the targets are not the inputs shifted by one"
    return ""


def _replace_tokens(tokens: Any, first: int) -> np.ndarray:
    """Replaces the tokens from `first` on, each by another one between the minimum and the maximum."""
    tokens = np.array(tokens)
    least, count = tokens.min(), int(np.ptp(tokens)) + 1
    shift = 1 + np.arange(tokens.shape[1] - first) % max(count - 1, 1)
    tokens[:, first:] = least + (tokens[:, first:].astype(np.int64) - least + shift) % count
    return tokens


def reweighted(batch: HostBatch, place: Any, weight: float) -> HostBatch:
    """Returns a batch in which the rows or positions at a place (an index of the weights) have another weight."""
    weights = np.array(batch[WEIGHTS])
    weights[place] = weight
    return {**batch, WEIGHTS: weights}


def _is_shared(loss: SharedLoss, batch: HostBatch, position: int, tolerance: float) -> bool:
    """Checks if the losses of two positions, measured one at a time with weight 1, change by the same amount."""
    places, inputs = sorted({position, position // 2, 0}), _replace_tokens(batch[INPUTS], position + 1)
    alone = [reweighted(reweighted(batch, ..., 0), np.s_[:, place], 1) for place in places]
    before = np.array([loss(each) for each in alone])
    changes = np.array([loss({**each, INPUTS: inputs}) for each in alone]) - before
    return len(places) > 1 and float(np.ptp(changes)) <= tolerance * np.abs(before).max()
