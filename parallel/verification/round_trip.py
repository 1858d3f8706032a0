"""Saves a state, restores it onto another mesh, and back: the arrays must be equal.

elsewhere = restored onto another mesh              bitwise equal to the state
back      = restored from elsewhere                 bitwise equal to the state, laid out as the step requires
one more step from `back` and from the state        equal results

States are compared with their blocks in the model's order, which `compare` has compared with one device.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from ...layouts.paths import leaves_with_paths
from ...layouts.sizes import format_mesh
from ...mesh.errors import UserError
from ..fsdp import FSDPConfig
from ..sharding.lay_out import lay_out
from ..step.build import build_step
from ..step.model_order import abstract_in_model_order, in_model_order, in_stored_order
from ..step.state import TrainState
from ..step.train_step import Step
from .differences import numbers, state_errors
from .reference import HostBatch

SaveAndRestore = Callable[[TrainState, TrainState], TrainState]
"""(a state, abstract values of another step's state) -> the state as restored for the other step."""


class RoundTrip(NamedTuple):
    """The result of saving and restoring a state.

    Attributes:
        restored_onto: The mesh that it was restored onto: axis -> size, for axes with a size over 1.
        arrays: The number of arrays.
        differing: One line for each array that changed.
        next_step_rel: The relative difference of one more step from the restored and from the original state.
    """

    restored_onto: Mapping[str, int]
    arrays: int
    differing: tuple[str, ...]
    next_step_rel: float

    @property
    def target(self) -> str:
        """The mesh that it was restored onto, such as "fsdp 8"."""
        return format_mesh(self.restored_onto)


def round_trip(
    step: Step, state: TrainState, batch: HostBatch, save_and_restore: SaveAndRestore | None = None
) -> RoundTrip:
    """Restores a state onto another mesh and back.

    Args:
        step: The step.
        state: A state; it is consumed.
        batch: The batch of one more step.
        save_and_restore: Writes and reads files; by default, arrays stay in memory.
    """
    move = save_and_restore or in_memory
    saved = in_model_order(state)
    other = _step_on_other_mesh(step)
    elsewhere = move(state, other.abstract_state())
    result = RoundTrip(other.plan.mesh.split_axes, len(jax.tree.leaves(saved)), (), float("inf"))
    lines = [*differing_arrays(in_model_order(elsewhere), saved, f"restored onto {result.target}")]
    stored = step.abstract_state()
    back = move(elsewhere, stored)
    lines += differing_arrays(in_model_order(back), saved, "restored from there")
    for (path, leaf), target in zip(leaves_with_paths(back), jax.tree.leaves(stored), strict=True):
        if not leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim):
            old, new = leaf.sharding.spec, target.sharding.spec
            lines.append(f"{path}, restored from there, has the sharding {old}, expected {new}")
    if lines:
        return result._replace(differing=tuple(lines))
    expected, found = (step(each, dict(batch)) for each in (state, back))
    expected, found = ((in_model_order(state), metrics) for state, metrics in (expected, found))
    return result._replace(next_step_rel=state_errors(found, expected, ())[0].relative)


def in_memory(state: TrainState, like: TrainState) -> TrainState:
    """Moves the arrays to another mesh, without files."""
    saved, abstract = in_model_order(state), abstract_in_model_order(like)
    moved = jax.tree.map(lambda leaf, target: jax.device_put(np.asarray(leaf), target.sharding), saved, abstract)
    return in_stored_order(moved, like)


def _step_on_other_mesh(step: Step) -> Step:
    """Builds the same training on another mesh of the same devices, or of one of them."""
    names, model, precision = list(map(str, step.plan.mesh.devices.flat)), step.given_model, step.precision
    for strategy in ({"fsdp": FSDPConfig(size=len(names), floor_bytes=1)}, {"data": len(names)}, {}):
        with suppress(UserError):
            devices = names if strategy else names[:1]
            plan = lay_out(model, strategy, precision=precision, devices=devices, indivisible="replicate")
            other = build_step(model, step.optimizer, plan, precision=precision)
            if other.plan.mesh.split_axes != step.plan.mesh.split_axes:
                return other
    return build_step(model, step.optimizer, step.plan, precision=precision)


def differing_arrays(found: Any, expected: Any, when: str) -> Iterator[str]:
    """Yields a line for each array that is not bitwise equal."""
    for (path, leaf), other in zip(leaves_with_paths(found), jax.tree.leaves(expected), strict=True):
        value, wanted = np.asarray(numbers(leaf)), np.asarray(numbers(other))
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            yield f"{path}, {when}, is {value.dtype}{list(value.shape)} and was {wanted.dtype}{list(wanted.shape)}"
        elif value.tobytes() != wanted.tobytes():
            yield f"{path}, {when}, {_describe_change(value, wanted)}"


def _describe_change(value: np.ndarray, expected: np.ndarray) -> str:
    """Describes how an array changed."""
    rows, wanted = ([row.tobytes() for row in np.atleast_1d(each)] for each in (value, expected))
    if len(rows) > 1 and sorted(rows) == sorted(wanted):
        return f"has the same rows of dim 0 in another order: {[rows.index(row) for row in wanted]}"
    return f"differs in {int((value != expected).sum())} of {value.size} numbers"
