"""Checks numbers on the GPU of this machine: `python benchmarks/check_gpu.py [attention] [steps]`.

The exit status is 1 if a number is wrong.

    attention   cuDNN's, and parts of it as ring attention uses them, against float32 at the highest precision:
                outputs and gradients; grouped heads, documents, heads of 64 and 128
    steps       two blocks trained for three steps on the GPU and on the CPU: losses and first gradients

An error is |found - expected| / |expected| of a whole array.
"""

import os
import sys
from dataclasses import replace
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from spmdkit.models import MoEConfig, TransformerConfig, moe, transformer
from spmdkit.models.attention import causal_attention, choose_attention
from spmdkit.parallel.blocks.attention import cudnn_parts, online_softmax
from spmdkit.parallel.blocks.attention.online_softmax import Marks, finish, merge

from spmdkit import Precision, build_step, lay_out

GPU, CPU = jax.devices("gpu")[0], jax.devices("cpu")[0]
BFLOAT16 = 2e-2
"""A few roundings to 8 bits, 2^-9 each, and those of the softmax."""
failed: list[str] = []


def check(name: str, error: float, limit: float) -> None:
    """Prints an error, and keeps the name if it is over its limit or not a number."""
    right = error <= limit
    print(f"{'' if right else 'WRONG '}{name}: {error:.1e} (at most {limit:.0e})", flush=True)
    if not right:
        failed.append(name)


def worst(found: Any, expected: Any) -> float:
    """Returns the largest error of an array; NaN if there is one."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return float(np.max([_error(np.float64(a), np.float64(b)) for a, b in pairs]))


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def check_attention(head: int, kv_heads: int, packed: bool) -> None:
    """Compares cuDNN's attention with our own in float32, and its parts, whole and in two chunks of a ring."""
    rows, length, heads = 2, 2048, 16
    random = np.random.default_rng(head + kv_heads)
    shapes = [(rows, length, n, head) for n in (heads, kv_heads, kv_heads, heads)]
    arrays = [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes]
    segment = jnp.asarray(np.cumsum(random.random((rows, length)) < 0.01, axis=1), jnp.int32) if packed else None
    wide = [x.astype(jnp.float32) for x in arrays]
    with jax.default_matmul_precision("highest"):
        expected = _with_gradients(causal_attention, wide, segment)
    name = f"attention, heads of {head}, {kv_heads} key-value heads{', documents' if packed else ''}"
    fused = choose_attention("cudnn", "gpu")
    for form, attend in (("cudnn", fused), ("own", causal_attention)):
        check(f"{name}, {form}", worst(_with_gradients(attend, arrays, segment), expected), BFLOAT16)
    for form, module in (("parts by cudnn", cudnn_parts), ("own parts", online_softmax)):
        check(f"{name}, {form}", worst(_in_parts(module, arrays, segment), expected), BFLOAT16)


def _with_gradients(attend: Any, arrays: list[Array], segment: Array | None) -> Any:
    """Returns the output and the gradients of query, key and value."""

    @jax.jit
    def run(query: Array, key: Array, value: Array, gradient: Array) -> Any:
        output, backward = jax.vjp(lambda *inputs: attend(*inputs, segment), query, key, value)
        return output, *backward(gradient)

    return run(*arrays)


def _in_parts(module: Any, arrays: list[Array], segment: Array | None) -> Any:
    """Returns the same by the parts of a ring: late queries attend to early keys, and each half to itself."""
    groups = arrays[1].shape[2]

    def split(x: Array) -> Array:  # (B, S, H, K) -> (B, G, R, S, K)
        B, S, H, K = x.shape
        return x.reshape(B, S, groups, H // groups, K).transpose(0, 2, 3, 1, 4)

    def join(x: Array) -> Array:
        B, G, R, S, K = x.shape
        return x.transpose(0, 3, 1, 2, 4).reshape(B, S, G * R, K)

    @jax.jit
    def run(query: Array, key: Array, value: Array, gradient: Array) -> Any:
        half = query.shape[1] // 2
        position = jnp.arange(half, dtype=jnp.int32)
        queries, keys, values = (jnp.split(x, 2, axis=1) for x in (query, key, value))
        documents = [None, None] if segment is None else jnp.split(segment, 2, axis=1)
        keys, values = ([x.swapaxes(1, 2) for x in each] for each in (keys, values))
        late_to_early = Marks(None, documents[1]), Marks(None, documents[0])
        causal = [(Marks(position, documents[i]), Marks(position, documents[i])) for i in (0, 1)]
        early, late = (module.attend(split(queries[i]), keys[i], values[i], *causal[i]) for i in (0, 1))
        late = merge(late, module.attend(split(queries[1]), keys[0], values[0], *late_to_early))
        outs, weights = zip(*(finish(part) for part in (early, late)), strict=True)
        outs = [join(out).astype(query.dtype) for out in outs]
        saved = [module.save(split, queries[i], jnp.split(gradient, 2, axis=1)[i], outs[i], weights[i]) for i in (0, 1)]
        own = [module.attend_backward(saved[i], keys[i], values[i], *causal[i]) for i in (0, 1)]
        dquery, dkey, dvalue = module.attend_backward(saved[1], keys[0], values[0], *late_to_early)
        dqueries = [own[0][0], own[1][0] + dquery]
        dkeys, dvalues = [own[0][1] + dkey, own[1][1]], [own[0][2] + dvalue, own[1][2]]
        back = [jnp.concatenate([x.swapaxes(1, 2) for x in each], axis=1) for each in (dkeys, dvalues)]
        return jnp.concatenate(outs, axis=1), jnp.concatenate([join(x) for x in dqueries], axis=1), *back

    return run(*arrays)


SIZES = {"vocabulary": 1000, "length": 512, "layers": 2, "width": 256, "heads": 4, "kv_heads": 2, "mlp_width": 512}
MODELS = {
    "mixture": (moe, MoEConfig(**SIZES, experts=4, top_k=2)),
    "dropless mixture": (moe, MoEConfig(**SIZES, experts=4, top_k=2, capacity_factor=0.0)),
    "transformer": (transformer, TransformerConfig(**SIZES)),
}


def train(
    kind: str, device: Any, dtype: str, remat: str = "none", attention: str = "auto", packed: bool = False
) -> Any:
    """Returns the losses of three steps, and the clipped gradients of the first."""
    make, config = MODELS[kind]
    model = make(replace(config, attention=attention))
    wide = {"params": dtype, "reduce": dtype} if dtype == "float64" else {}
    precision = Precision(compute=dtype, **wide)
    plan = lay_out(model, {}, precision=precision, devices=[f"{device.platform}:{device.id}"])
    step = build_step(model, optax.sgd(1.0, momentum=0.9), plan, clip_norm=0.5, remat=remat, precision=precision)
    shapes, random = jax.eval_shape(model.init, jax.random.key(0)), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: (0.05 * random.normal(size=leaf.shape)).astype(dtype_of(dtype)), shapes)
    state, losses, gradients = step.init(0, params), [], None
    for number in range(3):
        batch = batch_of(config, number, packed)
        state, metrics = step(state, jax.device_put(batch, plan.batch_sharding()))
        losses.append(float(metrics.loss))
        if not number:
            gradients = jax.device_get(state.opt_state)  # the first sum is the gradient
    return losses, gradients


def dtype_of(dtype: str) -> Any:
    return np.float64 if dtype == "float64" else np.float32


def batch_of(config: TransformerConfig, number: int, packed: bool) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number + 1)
    shape = (4, config.length)
    tokens = random.integers(0, config.vocabulary, shape).astype(np.int32)
    batch = {"inputs": tokens, "targets": np.roll(tokens, -1, 1), "weights": np.ones(shape, np.float32)}
    batch["example"] = np.arange(4, dtype=np.int32)
    if packed:
        starts = random.random(shape) < 0.01
        batch["segments"] = np.cumsum(starts, axis=1).astype(np.int32)
        batch["positions"] = np.tile(np.arange(config.length, dtype=np.int32), (4, 1))
    return batch


def check_steps() -> None:
    """Compares training on the GPU with training on the CPU."""
    for kind in MODELS:
        with jax.enable_x64(True):
            expected = train(kind, CPU, "float64")
            compare(f"{kind}, float64", train(kind, GPU, "float64"), expected, 1e-9, 1e-9)
        compare(f"{kind}, bfloat16", train(kind, GPU, "bfloat16"), expected, 1e-2, 1e-1)
        if kind != "transformer":
            continue
        compare(f"{kind}, float32", train(kind, GPU, "float32"), expected, 1e-3, 2e-2)
        with jax.default_matmul_precision("highest"):
            compare(f"{kind}, float32, highest", train(kind, GPU, "float32"), expected, 1e-5, 1e-4)
        same = [train(kind, GPU, "bfloat16", "full", "xla") for _ in range(2)]
        compare(f"{kind}, bfloat16, own attention, remat full", same[0], expected, 1e-2, 1e-1)
        print(f"two equal runs in bfloat16: {'the same bits' if same[0][0] == same[1][0] else same[0][0] + same[1][0]}")
    with jax.enable_x64(True):
        expected = train("transformer", CPU, "float64", packed=True)
    compare("documents, bfloat16", train("transformer", GPU, "bfloat16", "full", "cudnn", True), expected, 1e-2, 1e-1)


def compare(name: str, found: Any, expected: Any, of_losses: float, of_gradients: float) -> None:
    """Checks losses and gradients."""
    check(f"{name}, losses", worst(found[0], expected[0]), of_losses)
    check(f"{name}, gradients", worst(found[1], expected[1]), of_gradients)


def main() -> int:
    print(f"JAX {jax.__version__}, {GPU.device_kind}")
    parts = sys.argv[1:] or ["attention", "steps"]
    if "attention" in parts:
        for head, kv_heads, packed in ((128, 4, False), (64, 16, False), (128, 4, True)):
            check_attention(head, kv_heads, packed)
    if "steps" in parts:
        check_steps()
    print(f"wrong: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
