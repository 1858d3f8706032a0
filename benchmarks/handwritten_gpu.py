"""Llama-3 8B's step as an expert writes it by hand for GPUs, with `shard_map`: nothing of the runtime's parallel/.

FSDP gathers inside a checkpointed scan over the blocks, cuDNN's attention, one all-reduce over `data` at the end, AdamW
with clipping. Gradients are summed over `fsdp` in float32, the default of `precision.reduce`, or in bfloat16, as
autodiff of a hand-written gather does.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, HEADS, KV_HEADS, MLP, VOCABULARY = 4096, 32, 8, 14336, 128_256
HEAD = WIDTH // HEADS


class HandWritten(NamedTuple):
    """A jitted step `(params, slots), tokens -> (params, slots), loss`, and the shapes of its arguments."""

    jitted: Any
    state: Any
    tokens: jax.ShapeDtypeStruct


def handwritten(layers: int, data: int, fsdp: int, length: int, rows: int, devices: Any, reduce: str) -> HandWritten:
    """Builds the step.

    Args:
        layers: Blocks of the model.
        data: Size of the axis `data`.
        fsdp: Size of the axis `fsdp`.
        length: Positions of a row.
        rows: Rows of all devices.
        devices: JAX's devices.
        reduce: The dtype of sums over `fsdp`.
    """
    mesh = Mesh(np.array(devices).reshape(data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes(layers),
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    specs = jax.tree_util.tree_map_with_path(spec_of, params)
    slots = jax.eval_shape(optimizer.init, params)
    slot_specs = optax.tree_utils.tree_map_params(
        optimizer, lambda _, spec: spec, slots, specs, transform_non_params=lambda _: P()
    )
    row_spec = P(("data", "fsdp"))

    def gradients(params: Any, tokens: Any) -> Any:
        varying = jax.tree.map(lambda leaf, spec: lax.pcast(leaf, without(spec), to="varying"), params, specs)
        loss, found = jax.value_and_grad(mean_loss)(varying, tokens, rows * length, reduce)
        summed = jax.tree.map(lambda leaf, spec: lax.psum(leaf, without(spec)), found, specs)
        return lax.psum(loss, ("data", "fsdp")), summed

    across = jax.shard_map(gradients, mesh=mesh, in_specs=(specs, row_spec), out_specs=(P(), specs))

    def step(state: Any, tokens: Any) -> Any:
        params, slots = state
        loss, found = across(params, tokens)
        updates, slots = optimizer.update(found, slots, params)
        return (optax.apply_updates(params, updates), slots), loss

    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), (specs, slot_specs), is_leaf=lambda leaf: isinstance(leaf, P)
    )
    jitted = jax.jit(
        step,
        in_shardings=(shardings, NamedSharding(mesh, row_spec)),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return HandWritten(jitted, (params, slots), jax.ShapeDtypeStruct((rows, length), jnp.int32))


def shapes(layers: int) -> Any:
    """Shapes of the parameters of Llama-3 8B with this number of blocks."""
    return {
        "tokens": (VOCABULARY, WIDTH),
        "logits": (WIDTH, VOCABULARY),
        "norm": (WIDTH,),
        "blocks": {
            "query": (layers, WIDTH, WIDTH),
            "key": (layers, WIDTH, KV_HEADS * HEAD),
            "value": (layers, WIDTH, KV_HEADS * HEAD),
            "out": (layers, WIDTH, WIDTH),
            "gate": (layers, WIDTH, MLP),
            "up": (layers, WIDTH, MLP),
            "down": (layers, MLP, WIDTH),
            "attention_norm": (layers, WIDTH),
            "mlp_norm": (layers, WIDTH),
        },
    }


def spec_of(path: Any, leaf: Any) -> P:
    """FSDP's split: the first dim of a matrix that is not the number of blocks."""
    if path[0].key == "blocks":
        return P(None, "fsdp", None) if leaf.ndim == 3 else P()
    return P("fsdp", None) if leaf.ndim == 2 else P()


def without(spec: P) -> tuple[str, ...]:
    """The axes that a spec does not use."""
    return ("data",) if "fsdp" in spec else ("data", "fsdp")


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def whole(leaf: Any, reduce: str) -> Any:
    """Gathers a parameter in bfloat16; its gradient is reduce-scattered in the dtype `reduce`."""
    return lax.all_gather(leaf.astype(jnp.bfloat16), "fsdp", axis=0, tiled=True)


def scattered(reduce: str, _: None, gradient: Any) -> Any:
    return (lax.psum_scatter(gradient.astype(reduce), "fsdp", tiled=True).astype(jnp.float32),)


whole.defvjp(lambda leaf, reduce: (whole(leaf, reduce), None), scattered)


def norm(x: Any, scale: Any) -> Any:
    x = x.astype(jnp.float32)
    return (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale).astype(jnp.bfloat16)


def rotated(x: Any) -> Any:
    angles = jnp.arange(x.shape[1])[:, None] * 5e5 ** (-jnp.arange(0, HEAD // 2) / (HEAD // 2))
    cosine, sine = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype(jnp.bfloat16)


def block(reduce: str, x: Any, shards: Any) -> tuple[Any, None]:
    p = {name: leaf if leaf.ndim == 1 else whole(leaf, reduce) for name, leaf in shards.items()}
    y = norm(x, p["attention_norm"])
    query, key, value = ((y @ p[name]).reshape(*y.shape[:2], -1, HEAD) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(rotated(query), rotated(key), value, is_causal=True, implementation="cudnn")
    x = x + mixed.reshape(x.shape) @ p["out"]
    y = norm(x, p["mlp_norm"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None


def mean_loss(params: Any, tokens: Any, positions: int, reduce: str) -> Any:
    """The cross-entropy of one device's rows, divided by the positions of all devices."""
    x = whole(params["tokens"], reduce)[tokens]
    x, _ = lax.scan(jax.checkpoint(partial(block, reduce)), x, params["blocks"])
    logits = (norm(x, params["norm"]) @ whole(params["logits"], reduce)).astype(jnp.float32)
    targets = jnp.roll(tokens, -1, axis=1)
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, -1) - chosen) / positions
