"""The step as an expert writes it by hand in plain JAX, for one transformer, in two ways.

`jit_step`: `jit` with NamedSharding in and out, XLA partitions. `shard_map_step`: the collectives written out. Both
use the model's own arithmetic (embed, block, head), the same scan, remat and optimizer, and carry the same state as the
runtime's step; what is compared is how the step is distributed. Nothing here uses the runtime's parallel/.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
FLOOR_BYTES = 16384


def make_mesh(data: int, fsdp: int) -> Mesh:
    devices = jax.devices()[: data * fsdp]
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices)


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


def first_state(model: Any, optimizer: Any, mesh: Mesh) -> Any:
    """(params, opt_state, step, key), born sharded, and their shardings: what any resumable training carries."""
    abstract = jax.eval_shape(model.init, jax.random.key(0))
    layout = shardings(abstract, mesh)
    whole = NamedSharding(mesh, P())
    layouts = layout, state_shardings(optimizer, abstract, layout, mesh), whole, whole

    def init(key: Any) -> Any:
        params = model.init(key)
        return params, optimizer.init(params), jnp.zeros((), jnp.int32), jax.random.key_data(key)

    return jax.jit(init, out_shardings=layouts)(jax.random.key(0)), layouts


def jit_step(model: Any, optimizer: Any, mesh: Mesh, layouts: Any) -> Any:
    """XLA partitions: data parallel, FSDP or both follow from the shardings of the arguments alone."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, number, key = state

        def mean(params: Any) -> Any:
            total, weight = model.loss(params, batch, None)
            return total / weight, weight

        (loss, weight), gradients = jax.value_and_grad(mean, has_aux=True)(params)
        metrics = loss, optax.tree.norm(gradients), weight
        return (*_update(optimizer, params, opt_state, gradients), number + 1, key), metrics

    rows, whole = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P())
    return jax.jit(step, in_shardings=(layouts, rows), out_shardings=(layouts, whole), donate_argnums=0)


def _update(optimizer: Any, params: Any, opt_state: Any, gradients: Any) -> Any:
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


_MOVEMENT = (
    *("all_gather", "reshape", "transpose", "squeeze", "slice", "concatenate", "convert_element_type"),
    *("broadcast_in_dim", "pvary", "pcast", "stop_gradient", "split"),
)


def _drop_gathered(primitive: Any, *args: Any, **kwargs: Any) -> bool:
    """Remat: keep results of arithmetic, not gathered weights or copies: the fastest and smallest of those tried."""
    return primitive.name not in _MOVEMENT


def shard_map_step(model: Any, optimizer: Any, mesh: Mesh, layouts: Any) -> Any:
    """The collectives by hand: per-block gathers and scatters over fsdp, one reduction of the rest."""
    state_specs = jax.tree.map(lambda sharding: sharding.spec, layouts)
    specs = state_specs[0]
    axes = tuple(axis for axis in ("data", "fsdp") if mesh.shape[axis] > 1)

    def gather(leaf: Any, spec: Any, skip: int = 0) -> Any:
        dim = spec.index("fsdp") - skip if "fsdp" in spec else None
        return leaf if dim is None else lax.all_gather(leaf, "fsdp", axis=dim, tiled=True)

    def loss(params: Any, batch: Any) -> Any:
        outer = {name: jax.tree.map(gather, params[name], specs[name]) for name in ("embed", "head")}
        x = model.embed({name: outer[name] for name in model.embed_reads}, batch, None)

        def block(x: Any, shards: Any) -> Any:
            whole = jax.tree.map(partial(gather, skip=1), shards, specs["blocks"])
            return model.block(whole, x, None)

        if mesh.shape["fsdp"] > 1:
            block = jax.checkpoint(block, policy=_drop_gathered, prevent_cse=False)
        x, _ = lax.scan(lambda x, shards: (block(x, shards), None), x, params["blocks"], unroll=model.scan_unroll)
        return model.head({name: outer[name] for name in model.head_reads}, x, batch, None)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, number, key = state

        def vary(leaf: Any, spec: Any) -> Any:
            return lax.pcast(leaf, tuple(axis for axis in axes if axis not in spec), to="varying") if axes else leaf

        (total, weight), gradients = jax.value_and_grad(loss, has_aux=True)(jax.tree.map(vary, params, specs), batch)
        leaves, tree = jax.tree.flatten(gradients)
        leaf_specs = tree.flatten_up_to(specs)
        whole = [index for index, spec in enumerate(leaf_specs) if "fsdp" not in spec]
        if axes:
            *summed, total, weight = lax.psum([*(leaves[index] for index in whole), total, weight], axes)
            for index, value in zip(whole, summed, strict=True):
                leaves[index] = value
        if "data" in axes:
            split = [index for index in range(len(leaves)) if index not in whole]
            for index, value in zip(split, lax.psum([leaves[index] for index in split], "data"), strict=True):
                leaves[index] = value
        leaves = [leaf / weight for leaf in leaves]
        squares = [jnp.sum(leaf * leaf) for leaf in leaves]
        norm = sum(squares[index] for index in whole)
        if len(whole) < len(leaves):
            norm += lax.psum(sum(squares[index] for index in range(len(leaves)) if index not in whole), "fsdp")
        metrics = total / weight, jnp.sqrt(norm), weight
        return (*_update(optimizer, params, opt_state, jax.tree.unflatten(tree, leaves)), number + 1, key), metrics

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(state_specs, P(axes)), out_specs=(state_specs, P()))
    return jax.jit(mapped, donate_argnums=0)
