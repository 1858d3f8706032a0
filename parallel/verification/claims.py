"""What one verification proves, and what it did not look at: sentences that follow from what was measured."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ...layouts.paths import leaves_with_paths
from ...layouts.sizes import counted
from .reference import Reference
from .result import Verification

ALWAYS = (
    "the code of the model and the optimizer (both sides run it)",
    "reading and order of data",
    "`predict`",
    "several processes",
    "accelerators and their kernels",
    "speed and memory",
)
MOST_NAMED = 3


def frozen_parameters(reference: Reference) -> list[str]:
    """The parameters whose gradient is zero in every element on one device."""
    return [path for path, leaf in leaves_with_paths(reference.gradients) if not np.any(leaf)]


def proved(measured: Verification, *, files: bool, random: bool) -> Iterator[str]:
    """What is proved: nothing where something differs.

    Args:
        measured: What was measured.
        files: Whether the state went through files.
        random: Whether the loss depends on the key.
    """
    if not measured.ok:
        return
    yield from ("initial parameters", "loss", "weight", "gradients", "gradient norm")
    yield f"{counted(measured.steps, 'step')} with what each reports"
    yield "parameters and optimizer's state after them"
    if measured.model_state:
        yield "the model's state after them"
    if random:
        yield "random numbers"
    yield "collectives"
    if measured.evaluation_rel is not None:
        yield "evaluation"
    if measured.averages_rel is not None:
        yield "evaluation of the averages"
    if measured.loss_scale is not None:
        yield "a step that is not finite, and the loss scale"
    if measured.round_trip:
        onto = " x ".join(f"{axis} {size}" for axis, size in measured.round_trip.mesh.items()) or "1 device"
        yield f"{'a checkpoint in files' if files else 'the state in memory'} restored onto {onto} and back"
    if measured.future and measured.future.positions:
        yield f"losses that later tokens do not change (after {counted(len(measured.future.positions), 'position')})"


def not_looked_at(
    measured: Verification,
    reference: Reference,
    params: Any,
    *,
    files: bool,
    random: bool,
    clip_norm: float,
) -> Iterator[str]:
    """What a run did not look at.

    Args:
        measured: What was measured.
        reference: The training on one device.
        params: The initial parameters, on the host.
        files: Whether the state went through files.
        random: Whether the loss depends on the key.
        clip_norm: What the step was built with.
    """
    future, trip = measured.future, measured.round_trip
    yield from ALWAYS
    if measured.notes:
        yield "what GPUs run in place of what the note says"
    if trip is None:
        yield "evaluation, checkpoints and later tokens (what comes before differs)"
    elif not files:
        yield "checkpoint files"
    if trip and measured.evaluation_rel is None:
        yield "evaluation (one device cannot evaluate the model)"
    if future and future.untried:
        yield f"later tokens ({future.untried})"
    if future and future.shared:
        yield "a term of the loss that all positions of a row share (later tokens change it)"
    if not random:
        yield "random numbers (the loss does not depend on the key)"
    if measured.collectives.of_the_model:
        yield "how much the model's own sums over the batch axes move"
    if clip_norm and all(norm <= clip_norm for norm in reference.norms):
        yield f"clipping (no norm was over {clip_norm:g})"
    yield from _still(reference, params)
    if measured.reduced:
        yield "the config's own sizes"
    yield f"other dtypes than {measured.dtype}"


def _still(reference: Reference, params: Any) -> Iterator[str]:
    """Parameters without a gradient, and those that no update moved."""
    frozen = frozen_parameters(reference)
    if frozen:
        yield f"gradients that are zero on one device ({_some(frozen)})"
    last = jax.tree.leaves(reference.params)
    pairs = zip(leaves_with_paths(params), last, strict=True)
    still = [path for (path, first), other in pairs if path not in frozen and np.array_equal(first, other)]
    if still:
        yield f"updates of what does not move on one device ({_some(still)})"


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
    return ", ".join(paths[:MOST_NAMED]) + more
