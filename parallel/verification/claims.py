"""The last line of a verification: the proved properties, and those that were not checked."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from ...layouts.paths import leaves_with_paths
from ..model import Params
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
    return [path for path, leaf in leaves_with_paths(reference.first.gradients) if not np.any(leaf)]


def proved(measured: Verification, *, files: bool, random: bool) -> Iterator[str]:
    """Yields the proved properties; none if anything differs.

    Args:
        measured: The measurements.
        files: True if the state was written to files.
        random: True if the loss depends on the key.
    """
    if not measured.ok:
        return
    yield from measured.errors
    yield "collectives"
    if random:
        yield "random numbers"
    if measured.loss_scale is not None:
        yield "a step that is not finite, and the loss scale"
    if trip := measured.round_trip:
        yield f"{'a checkpoint in files' if files else 'the state in memory'} restored onto {trip.target} and back"


def not_looked_at(
    measured: Verification, reference: Reference, params: Params, *, files: bool, random: bool, clip_norm: float
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
    frozen = frozen_parameters(reference)
    pairs = zip(leaves_with_paths(params), jax.tree.leaves(reference.params), strict=True)
    still = [path for (path, first), last in pairs if path not in frozen and np.array_equal(first, last)]
    conditions = {
        "the GPU code that replaces what the note describes": measured.notes,
        "evaluation, checkpoints and later tokens (what comes before differs)": trip is None,
        "checkpoint files": trip and not files,
        "evaluation (one device cannot evaluate the model)": trip and "evaluation" not in measured.errors,
        f"later tokens ({future.untried})": future.untried,
        "a term of the loss that all positions of a row share (later tokens change it)": future.shared,
        "random numbers (the loss does not depend on the key)": not random,
        "how much the model's own sums over the batch axes move": measured.collectives.of_the_model,
        f"clipping (no norm was over {clip_norm:g})": clip_norm and max(reference.norms) <= clip_norm,
        f"gradients that are zero on one device ({_some(frozen)})": frozen,
        f"updates of what does not move on one device ({_some(still)})": still,
        "the config's own sizes": measured.reduced,
    }
    yield from ALWAYS
    yield from (text for text, condition in conditions.items() if condition)
    yield f"other dtypes than {measured.dtype}"


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    return ", ".join(paths[:MAX_NAMED]) + more
