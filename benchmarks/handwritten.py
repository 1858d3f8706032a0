"""The step as an expert writes it by hand in plain JAX: data parallel, FSDP and their product, in two ways.

`jit_step`: `jit` with NamedSharding in and out, XLA partitions. `shard_map_step`: the collectives written out. Both
use the model's own arithmetic (embed, block, head), the same scan, remat and optimizer, and carry the same state as the
runtime's step; what is compared is how the step is distributed. Nothing here uses the runtime's parallel/.

`handwritten_tensor.py` and `handwritten_pipeline.py` do the same for other meshes, with the pieces below: a state born
sharded, one reduction of the gradients, the norm, the update.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from spmdkit.mesh.compat import varying_axes
from spmdkit.models.transformer import TransformerConfig, transformer

P = PartitionSpec
FLOOR_BYTES = 16384


class HandWritten(NamedTuple):
    """A step (state, batch) -> (state, (loss, norm, weight)), its first state, and how a batch is laid out."""

    step: Any
    state: Any
    rows: NamedSharding


def by_jit(config: TransformerConfig, optimizer: Any, **sizes: int) -> HandWritten:
    return _written(jit_step, config, optimizer, sizes)


def by_shard_map(config: TransformerConfig, optimizer: Any, **sizes: int) -> HandWritten:
    return _written(shard_map_step, config, optimizer, sizes)


def _written(make: Any, config: TransformerConfig, optimizer: Any, sizes: dict[str, int]) -> HandWritten:
    model, mesh = transformer(config), make_mesh(**{"data": 1, "fsdp": 1, **sizes})
    state, layouts = first_state(model, optimizer, mesh)
    return HandWritten(make(model, optimizer, mesh, layouts), state, NamedSharding(mesh, P(("data", "fsdp"))))


def make_mesh(**sizes: int) -> Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def shardings(params: Any, mesh: Mesh) -> Any:
    """Every leaf of at least 16 KiB a block split along its first dim that fsdp divides."""

    def spec(path: Any, leaf: Any) -> NamedSharding:
        first = 1 if path[0].key == "blocks" else 0
        size = mesh.shape["fsdp"]
        if size > 1 and leaf.size * leaf.dtype.itemsize // (leaf.shape[0] if first else 1) >= FLOOR_BYTES:
            for dim in range(first, leaf.ndim):
                if leaf.shape[dim] % size == 0:
                    return NamedSharding(mesh, P(*(["fsdp" if d == dim else None for d in range(leaf.ndim)])))
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(spec, params)


def state_shardings(optimizer: Any, params: Any, layout: Any, mesh: Mesh) -> Any:
    """Adam's moments like their parameters, scalars everywhere."""
    state = jax.eval_shape(optimizer.init, params)
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, sharding: sharding,
        state,
        layout,
        transform_non_params=lambda leaf: NamedSharding(mesh, P()),
    )


def first_state(model: Any, optimizer: Any, mesh: Mesh, lay_out: Any = shardings) -> Any:
    """(params, opt_state, step, key), born sharded, and their shardings: what any resumable training carries."""
    abstract = jax.eval_shape(model.init, jax.random.key(0))
    layout = lay_out(abstract, mesh)
    whole = NamedSharding(mesh, P())
    layouts = layout, state_shardings(optimizer, abstract, layout, mesh), whole, whole

    def init(key: Any) -> Any:
        params = model.init(key)
        return params, optimizer.init(params), jnp.zeros((), jnp.int32), jax.random.key_data(key)

    return jax.jit(init, out_shardings=layouts)(jax.random.key(0)), layouts


def jit_step(model: Any, optimizer: Any, mesh: Mesh, layouts: Any) -> Any:
    """XLA partitions: data parallel, FSDP or both follow from the shardings of the arguments alone."""
    return jit_of(lambda params, batch: model.loss(params, batch, None), optimizer, mesh, layouts)


def jit_of(loss: Any, optimizer: Any, mesh: Mesh, layouts: Any) -> Any:
    """A step from `loss(params, batch) -> (sum, weight)` over global arrays."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, number, key = state

        def mean(params: Any) -> Any:
            total, weight = loss(params, batch)
            return total / weight, weight

        (loss_, weight), gradients = jax.value_and_grad(mean, has_aux=True)(params)
        metrics = loss_, optax.tree.norm(gradients), weight
        return (*update(optimizer, params, opt_state, gradients), number + 1, key), metrics

    rows, whole = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P())
    return jax.jit(step, in_shardings=(layouts, rows), out_shardings=(layouts, whole), donate_argnums=0)


def update(optimizer: Any, params: Any, opt_state: Any, gradients: Any) -> Any:
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


_MOVEMENT = (
    *("reshape", "transpose", "squeeze", "slice", "concatenate", "convert_element_type"),
    *("broadcast_in_dim", "pvary", "pcast", "stop_gradient", "split"),
)


def drop_gathered(primitive: Any, *_: Any, **given: Any) -> bool:
    """Remat: keep results of arithmetic, not gathered weights or copies: the fastest and smallest of those tried."""
    if primitive.name.startswith("all_gather"):
        return "tensor" in given["axis_name"]
    return primitive.name not in _MOVEMENT


def gather(leaf: Any, spec: Any, skip: int = 0) -> Any:
    """A leaf (of one block, with skip = 1) whole over fsdp."""
    dims = [dim for dim, axes in enumerate(spec) if "fsdp" in (axes if isinstance(axes, tuple) else (axes,))]
    return lax.all_gather(leaf, "fsdp", axis=dims[0] - skip, tiled=True) if dims else leaf


def shard_map_step(model: Any, optimizer: Any, mesh: Mesh, layouts: Any) -> Any:
    """The collectives by hand: per-block gathers and scatters over fsdp, one reduction of the rest."""
    specs = jax.tree.map(lambda sharding: sharding.spec, layouts[0])

    def loss(params: Any, batch: Any) -> Any:
        outer = {name: jax.tree.map(gather, params[name], specs[name]) for name in ("embed", "head")}
        x = model.embed({name: outer[name] for name in model.embed_reads}, batch, None)

        def block(x: Any, shards: Any) -> Any:
            whole = jax.tree.map(partial(gather, skip=1), shards, specs["blocks"])
            return model.block(whole, x, None)

        if mesh.shape["fsdp"] > 1:
            block = jax.checkpoint(block, policy=drop_gathered, prevent_cse=False)
        x, _ = lax.scan(lambda x, shards: (block(x, shards), None), x, params["blocks"], unroll=model.scan_unroll)
        return model.head({name: outer[name] for name in model.head_reads}, x, batch, None)

    return shard_map_of(loss, optimizer, mesh, layouts)


def shard_map_of(loss: Any, optimizer: Any, mesh: Mesh, layouts: Any, rows: tuple[str, ...] = ("data", "fsdp")) -> Any:
    """A step from `loss(shards, rows) -> (sum, weight)` of one device, or of a group of devices that have the same."""
    state_specs = jax.tree.map(lambda sharding: sharding.spec, layouts)
    specs, batch = state_specs[0], P(tuple(axis for axis in rows if mesh.shape[axis] > 1))
    axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, number, key = state
        sums, gradients = jax.value_and_grad(loss, has_aux=True)(jax.tree.map(vary(axes), params), batch)
        gradients, (total, weight) = reduce(gradients, specs, [share(value, mesh, axes) for value in sums], axes)
        gradients = jax.tree.map(lambda leaf: leaf / weight, gradients)
        metrics = total / weight, norm(gradients, specs, mesh, axes), weight
        return (*update(optimizer, params, opt_state, gradients), number + 1, key), metrics

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(state_specs, batch), out_specs=(state_specs, P()))
    return jax.jit(mapped, donate_argnums=0)


def vary(axes: tuple[str, ...]) -> Any:
    """Types a value as different on each device, so that nothing is summed behind our back."""

    def cast(value: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(value))
        return lax.pcast(value, missing, to="varying") if missing else value

    return cast


def share(value: Any, mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """This device's part of a sum, some of which is the same on all devices of an axis."""
    copies = math.prod(mesh.shape[axis] for axis in axes if axis not in varying_axes(value))
    return vary(axes)(value / copies if copies > 1 else value)


def reduce(gradients: Any, specs: Any, scalars: list[Any], axes: tuple[str, ...]) -> Any:
    """Sums each leaf over the axes that it is not split over, with one all-reduce for each set of them."""
    leaves, tree = jax.tree.flatten(gradients)
    missing = [tuple(axis for axis in axes if axis not in used(spec)) for spec in tree.flatten_up_to(specs)]
    for bucket in {axes: None} | dict.fromkeys(filter(None, missing)):
        members = [index for index, lacking in enumerate(missing) if lacking == bucket]
        passengers = scalars if bucket == axes else []
        summed = lax.psum([*(leaves[index] for index in members), *passengers], bucket)
        for index, value in zip(members, summed, strict=False):
            leaves[index] = value
        scalars = summed[len(members) :] if passengers else scalars
    return jax.tree.unflatten(tree, leaves), scalars


def norm(gradients: Any, specs: Any, mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """The norm over all devices' shards: one all-reduce for each set of axes that leaves are split over."""
    leaves, tree = jax.tree.flatten(gradients)
    squares: dict[Any, Any] = {}
    for leaf, spec in zip(leaves, tree.flatten_up_to(specs), strict=True):
        split = tuple(axis for axis in axes if axis in used(spec))
        squares[split] = squares.get(split, 0.0) + jnp.sum(leaf * leaf)
    return jnp.sqrt(sum(lax.psum(value, split) if split else value for split, value in squares.items()))


def used(spec: Any) -> set[str]:
    """The axes of a PartitionSpec."""
    return {name for axes in spec if axes for name in (axes if isinstance(axes, tuple) else (axes,))}
