"""Runs a per-device function over the manual axes of a mesh, with JAX's checks of varying axes."""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from ..plan import ShardingPlan
from ..xla.error_texts import UNTYPED, matches


class UncheckedStep(UserWarning):
    """Warns that a step was compiled with `check_vma=False`, because of a loop in the model."""


def over_manual_axes(
    local: Callable[..., Any], plan: ShardingPlan, in_specs: Any, out_specs: Any, *, abstract: bool
) -> Callable[..., Any]:
    """Applies `shard_map` over the manual axes. XLA handles the other axes; without manual axes, nothing is mapped.

    Traces with JAX's checks of varying axes, and falls back to tracing without them if the model fails them. A model
    that starts a loop from constants (`jnp.zeros` as a recurrent state) is correct, but fails the checks inside
    `shard_map`. The runtime's own collectives give the same results with and without the checks.

    Args:
        local: The function that each device runs on its own shards.
        plan: The mesh and its manual axes.
        in_specs: The specs of the arguments, with manual axes only.
        out_specs: The specs of the results, with manual axes only.
        abstract: Whether to map over a mesh without devices, for lowering.

    Returns:
        A function of global arrays.
    """
    if not plan.manual_axes:
        return local
    mesh = plan.mesh.abstract_mesh if abstract else plan.mesh.backend_mesh
    # Includes axes of size 1: if XLA handles no axis, its CPU backend can reduce 16-bit numbers.
    axes = {axis for axis in plan.mesh.axis_names if axis in plan.manual_axes or plan.mesh.axis_size(axis) == 1}
    checked, unchecked = (
        jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=check_vma)
        for check_vma in (True, False)
    )

    def call(*arguments: Any) -> Any:
        try:
            return checked(*arguments)
        except (TypeError, ValueError) as error:
            if not matches(error, *UNTYPED):
                raise
            reason = str(error)
        warnings.warn(
            "The model does not pass JAX's checks of varying mesh axes (check_vma), so this step is compiled without "
            "them; its numbers are the same. To enable the checks, start loops from values computed from the inputs "
            f"(jnp.zeros_like(x) instead of jnp.zeros). JAX reports: {reason.splitlines()[0]}",
            UncheckedStep,
            stacklevel=2,
        )
        return unchecked(*arguments)

    return call
