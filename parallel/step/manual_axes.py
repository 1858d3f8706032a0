"""Running a per-device function over the manual axes of a mesh, with JAX's checks of what varies over them."""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from ..plan import ShardingPlan
from ..xla.error_texts import NO_MESH, UNTYPED, says


class UncheckedStep(UserWarning):
    """A step was compiled with `check_vma=False`, because of a loop in the model."""


def over_manual_axes(
    local: Callable[..., Any], plan: ShardingPlan, in_specs: Any, out_specs: Any, *, abstract: bool
) -> Callable[..., Any]:
    """`shard_map` over the manual axes; other axes of the mesh stay with XLA; without manual axes nothing is mapped.

    Args:
        local: What each device runs on its own shards.
        plan: The mesh and its manual axes.
        in_specs: Specs of the arguments, naming manual axes alone.
        out_specs: Specs of the results, likewise.
        abstract: Map over a mesh without devices, for lowering only.

    Returns:
        A function of global arrays.
    """
    if not plan.manual_axes:
        return _with_mesh(local, plan, abstract)
    mesh = plan.mesh.abstract_mesh if abstract else plan.mesh.backend_mesh
    # Axes of size 1 as well: with none left to XLA, its CPU backend can reduce 16-bit numbers.
    axes = {axis for axis in plan.mesh.axis_names if axis in plan.manual_axes or plan.mesh.axis_size(axis) == 1}
    checked, unchecked = (
        jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=check_vma)
        for check_vma in (True, False)
    )
    return _with_fallback(checked, unchecked)


def _with_mesh(local: Callable[..., Any], plan: ShardingPlan, abstract: bool) -> Callable[..., Any]:
    """The same function of global arrays; where its model calls `jax.shard_map` without a mesh, on that of the step."""
    if plan.mesh.size == 1:
        return local

    def call(*arguments: Any) -> Any:
        try:
            return local(*arguments)
        except ValueError as error:
            if not says(error, NO_MESH):
                raise
        mesh = plan.mesh.abstract_mesh if abstract else plan.mesh.backend_mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(mesh):
            return local(*arguments)

    return call


def _with_fallback(checked: Callable[..., Any], unchecked: Callable[..., Any]) -> Callable[..., Any]:
    """Traces with JAX's checks of what varies over the mesh, and without them where only the model does not type.

    A model that starts a loop from constants (`jnp.zeros` as a recurrent state) is right, yet does not type inside
    `shard_map`. The runtime's own collectives are written to mean the same with and without the checks.
    """

    def call(*arguments: Any) -> Any:
        try:
            return checked(*arguments)
        except (TypeError, ValueError) as error:
            if not says(error, *UNTYPED):
                raise
            reason = str(error)
        warnings.warn(
            "The model does not pass JAX's checks of what varies over the mesh (check_vma), so this step is compiled "
            "without them; its numbers are the same. To have the checks, start loops from values made of the inputs "
            f"(jnp.zeros_like(x) instead of jnp.zeros). JAX says: {reason.splitlines()[0]}",
            UncheckedStep,
            stacklevel=2,
        )
        return unchecked(*arguments)

    return call
