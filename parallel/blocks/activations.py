"""A look at the inside of a step: what flows between the blocks of one device. Nothing runs."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ...mesh.keys import make_key
from ..fsdp import gather
from ..model import Activations, Batch, BlockModel, Params
from ..plan import ShardingPlan
from ..precision import Precision
from .forward import without_blocks
from .model_parts import make_parts

Seen = TypeVar("Seen")


def on_activations(
    look: Callable[[Params, Activations], Seen],
    model: BlockModel,
    plan: ShardingPlan,
    microbatch: Mapping[str, jax.ShapeDtypeStruct],
    precision: Precision,
) -> Seen:
    """Calls a function inside the `shard_map` of a step, on traced values.

    Args:
        look: `look(params, x) -> anything but traced values`, of a device's parameters as a step has them, and of what
            its embedding makes of a microbatch.
        model: The model, split over the axes inside it.
        plan: Where its parameters live.
        microbatch: Per-device shapes of one microbatch.
        precision: The dtypes.

    Returns:
        What `look` returns.
    """
    parts = make_parts(model, plan, remat="none", precision=precision)
    seen: list[Seen] = []

    def local(params: Params, rows: Batch) -> Array:
        kept = gather(without_blocks(params), without_blocks(plan.used_table.layouts), plan.gather_axes, precision)
        groups = {name: params[name] for name in model.embed_reads}
        batch = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in microbatch.items()}
        seen.append(look(params, parts.embed(groups, kept, batch, make_key(0))))
        return jnp.zeros(())

    mapped = jax.shard_map(
        local,
        mesh=plan.mesh.abstract_mesh,
        in_specs=(plan.manual_specs(plan.used_table), PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names=set(plan.manual_axes),
        check_vma=False,
    )
    jax.eval_shape(mapped, plan.used_table.abstract_arrays, {})
    return seen[0]
