"""Summaries of a verification: the proved properties, and those that were not checked."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ...layouts.paths import leaves_with_paths
from ...layouts.sizes import counted
from .causality import Future
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
MAX_NAMED = 3


def frozen_parameters(reference: Reference) -> list[str]:
    """Returns the parameters with a gradient of zero on one device."""
    return [path for path, leaf in leaves_with_paths(reference.gradients) if not np.any(leaf)]


def proved(measured: Verification, *, files: bool, random: bool) -> Iterator[str]:
    """Yields the proved properties; none if anything differs.

    Args:
        measured: The measurements.
        files: True if the state was written to files.
        random: True if the loss depends on the key.
    """
    if not measured.ok:
        return
    trip, later = measured.round_trip, (measured.future or Future()).positions
    onto = " x ".join(f"{axis} {size}" for axis, size in trip.mesh.items()) if trip else ""
    saved = f"{'a checkpoint in files' if files else 'the state in memory'} restored onto {onto or '1 device'} and back"
    yield from ("initial parameters", "loss", "weight", "gradients", "gradient norm")
    yield from (
        f"{counted(measured.steps, 'step')} with what each reports",
        "parameters and optimizer's state after them",
    )
    yield from _applying(
        (measured.model_state, "the model's state after them"),
        (random, "random numbers"),
        (True, "collectives"),
        (measured.evaluation_rel is not None, "evaluation"),
        (measured.averages_rel is not None, "evaluation of the averages"),
        (measured.loss_scale is not None, "a step that is not finite, and the loss scale"),
        (trip, saved),
        (later, f"losses that later tokens do not change (after {counted(len(later), 'position')})"),
    )


def _applying(*texts: tuple[Any, str]) -> Iterator[str]:
    """Yields the texts with a condition that is true."""
    return (text for condition, text in texts if condition)


def not_looked_at(
    measured: Verification,
    reference: Reference,
    params: Any,
    *,
    files: bool,
    random: bool,
    clip_norm: float,
) -> Iterator[str]:
    """Yields the properties that were not checked.

    Args:
        measured: The measurements.
        reference: The training on one device.
        params: The initial parameters, on the host.
        files: True if the state was written to files.
        random: True if the loss depends on the key.
        clip_norm: The maximum gradient norm of the step.
    """
    future, trip = measured.future or Future(), measured.round_trip
    yield from ALWAYS
    yield from _applying(
        (measured.notes, "the GPU code that replaces what the note describes"),
        (trip is None, "evaluation, checkpoints and later tokens (what comes before differs)"),
        (trip and not files, "checkpoint files"),
        (trip and measured.evaluation_rel is None, "evaluation (one device cannot evaluate the model)"),
        (future.untried, f"later tokens ({future.untried})"),
        (future.shared, "a term of the loss that all positions of a row share (later tokens change it)"),
        (not random, "random numbers (the loss does not depend on the key)"),
        (measured.collectives.of_the_model, "how much the model's own sums over the batch axes move"),
        (clip_norm and max(reference.norms) <= clip_norm, f"clipping (no norm was over {clip_norm:g})"),
    )
    yield from _still(reference, params)
    if measured.reduced:
        yield "the config's own sizes"
    yield f"other dtypes than {measured.dtype}"


def _still(reference: Reference, params: Any) -> Iterator[str]:
    """Yields parameters without a gradient, and those that updates do not change."""
    frozen = frozen_parameters(reference)
    if frozen:
        yield f"gradients that are zero on one device ({_some(frozen)})"
    last = jax.tree.leaves(reference.params)
    pairs = zip(leaves_with_paths(params), last, strict=True)
    still = [path for (path, first), other in pairs if path not in frozen and np.array_equal(first, other)]
    if still:
        yield f"updates of what does not move on one device ({_some(still)})"


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    return ", ".join(paths[:MAX_NAMED]) + more
