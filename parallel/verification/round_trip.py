"""A state saved, restored onto another mesh, and restored from there: the same arrays, blocks where the model has them.

saved     = to_model(state)                         against one device: block n is block n
elsewhere = restored onto another mesh              bit for bit what was saved
back      = to_stored(restored from elsewhere)      bit for bit the state, laid out as the step wants it
one more step from `back` and from the state        the same
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...layouts.paths import leaves_with_paths
from ...mesh.errors import UserError
from ..fsdp import FSDPConfig
from ..sharding.lay_out import lay_out
from ..sharding.stored_order import stored_order
from ..step.build import build_step
from ..step.state import TrainState
from ..step.train_step import Step
from .differences import LeafError, leaf_errors, numbers, relative, undecided_elements
from .reference import HostBatch, OneDevice, Reference

SaveAndRestore = Callable[[TrainState, TrainState], TrainState]
"""(a state in the model's order, abstract values on another mesh) -> what comes back there."""


class RoundTrip(NamedTuple):
    """What came of a state that was saved and restored.

    Attributes:
        mesh: the mesh that it was restored onto: axis -> size, of those over 1.
        arrays: how many arrays it has.
        params: every parameter as saved, in the model's order, against one device, the worst first.
        differing: one line for each array that did not come back as it was.
        next_step: how far one more step from what came back is from one that was never interrupted.
    """

    mesh: Mapping[str, int]
    arrays: int
    params: tuple[LeafError, ...]
    differing: tuple[str, ...]
    next_step: float


def round_trip(
    step: Step,
    state: TrainState,
    batch: HostBatch,
    reference: Reference,
    one_device: OneDevice,
    *,
    save_and_restore: SaveAndRestore | None,
    tolerance: float,
) -> RoundTrip:
    """Sends a state to another mesh and back.

    Args:
        step: The step.
        state: Its state after the reference's steps; it is consumed.
        batch: The batch of one more step.
        reference: The same training on one device.
        one_device: The one device.
        save_and_restore: Writes and reads files; None passes arrays on in memory.
        tolerance: What rounding explains in parameters.
    """
    move, order = save_and_restore or in_memory, stored_order(step.plan)
    saved = order.to_model(state)
    moved = reference.moved and one_device.to_model(reference.moved.params)
    left_out = one_device.to_model(undecided_elements(reference, tolerance))
    options: Any = {"tolerance": tolerance, "moved": moved, "left_out": left_out}
    params = leaf_errors(saved.params, one_device.to_model(reference.params), **options)
    other = _elsewhere(step)
    elsewhere = move(saved, other.abstract_state())
    names = _sizes(other)
    lines = [*_differing(elsewhere, saved, f"restored onto {_named(names)}")]
    stored = step.abstract_state()
    back = order.to_stored(move(elsewhere, order.abstract_model(stored)), stored)
    lines += _differing(order.to_model(back), saved, "restored from there")
    lines += _misplaced(back, stored)
    next_step = float("inf")
    if not lines:
        after = [step(each, dict(batch)) for each in (state, back)]
        next_step = _apart(*((order.to_model(state), metrics) for state, metrics in after))
    return RoundTrip(names, len(jax.tree.leaves(saved)), tuple(params), tuple(lines), next_step)


def in_memory(state: TrainState, like: TrainState) -> TrainState:
    """The same arrays on another mesh, without files."""
    return jax.tree.map(lambda leaf, target: jax.device_put(np.asarray(leaf), target.sharding), state, like)


def _elsewhere(step: Step) -> Step:
    """The same training on another mesh of the same devices, or of one of them."""
    names = list(map(str, step.layouts.mesh.devices.flat))
    here = _sizes(step)
    for strategy in ({"fsdp": FSDPConfig(size=len(names), floor_bytes=1)}, {"data": len(names)}, {}):
        devices = names if strategy else names[:1]
        try:
            layouts = lay_out(
                step.given_model, strategy, precision=step.precision, devices=devices, indivisible="replicate"
            )
        except UserError:
            continue
        other = build_step(step.given_model, step.optimizer, layouts, precision=step.precision)
        if _sizes(other) != here:
            return other
    return build_step(step.given_model, step.optimizer, step.layouts, precision=step.precision)


def _sizes(step: Step) -> dict[str, int]:
    mesh = step.layouts.mesh
    return {axis: mesh.axis_size(axis) for axis in mesh.axis_names if mesh.axis_size(axis) > 1}


def _named(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "1 device"


def _differing(found: Any, expected: Any, when: str) -> Iterator[str]:
    """The arrays that are not the same, bit for bit."""
    for (path, leaf), other in zip(leaves_with_paths(found), jax.tree.leaves(expected), strict=True):
        value, wanted = np.asarray(numbers(leaf)), np.asarray(numbers(other))
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            yield f"{path}, {when}, is {value.dtype}{list(value.shape)} and was {wanted.dtype}{list(wanted.shape)}"
        elif value.tobytes() != wanted.tobytes():
            yield f"{path}, {when}, {_how(value, wanted)}"


def _how(value: np.ndarray, expected: np.ndarray) -> str:
    """In what way an array is another one."""
    if value.ndim and len(value) > 1:
        rows, wanted = ([row.tobytes() for row in each] for each in (value, expected))
        if sorted(rows) == sorted(wanted):
            places = [rows.index(row) for row in wanted]
            return f"has the same rows of dim 0 in another order: {places}"
    if np.array_equal(np.sort(value, axis=None), np.sort(expected, axis=None)):
        return "has the same numbers in other places"
    return f"differs in {int((value != expected).sum())} of {value.size} numbers"


def _misplaced(state: Any, abstract: Any) -> Iterator[str]:
    """Arrays that are not laid out as the step wants them."""
    for (path, leaf), target in zip(leaves_with_paths(state), jax.tree.leaves(abstract), strict=True):
        if not leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim):
            yield f"{path}, restored from there, lies as {leaf.sharding.spec}, and the step has {target.sharding.spec}"


def _apart(found: Any, expected: Any) -> float:
    """The largest difference between two results of a step, each array measured by its own largest element."""
    worst = 0.0
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        value, wanted = np.asarray(numbers(leaf)), np.asarray(numbers(other))
        if np.array_equal(value, wanted, equal_nan=jnp.issubdtype(value.dtype, jnp.floating)):
            continue
        largest = float(np.abs(wanted).max())
        worst = max(worst, relative(largest + float(np.abs(value - wanted).max()), largest))
    return worst
