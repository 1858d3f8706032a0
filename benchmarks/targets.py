"""Compares our step with a hand-written one for H100s that are not here: `python benchmarks/targets.py [CASE ...]`.

Both are compiled by XLA for the target and simulated by `planning/timeline.py`; nothing runs on a GPU. The hand-written
step is what an expert writes for Llama-3 8B with `shard_map`: FSDP gathers inside a checkpointed scan over the blocks,
cuDNN's attention, one all-reduce over `data` at the end, AdamW. It uses nothing of the runtime's parallel/. Both steps
are compiled twice: with gradients reduce-scattered in float32, the default of `precision.reduce`, and in bfloat16, as
autodiff of a hand-written gather does.

Needs the compiler: `make test-targets` installs it into build/targets, so run it with PYTHONPATH=build/targets.
"""

import argparse
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from spmdkit.mesh.targets import compiling_for, parse_target, target_devices
from spmdkit.models import TransformerConfig, transformer
from spmdkit.parallel.blocks.gathered_block import REMAT_POLICIES
from spmdkit.planning.pipeline_time import pipeline_seconds, textbook_seconds
from spmdkit.planning.timeline import simulate
from spmdkit.runtime.compilation import default_options

from spmdkit import Precision, ShardingPlan, build_step, lay_out, list_devices

LAYERS, WIDTH, HEADS, KV_HEADS, MLP, VOCABULARY = 32, 4096, 32, 8, 14336, 128_256
HEAD = WIDTH // HEADS
XLA = {"xla_gpu_enable_triton_gemm": False}


class Case(NamedTuple):
    """A target, a strategy, the rows of each GPU, and what backward recomputes."""

    target: str
    strategy: dict[str, Any]
    length: int
    rows: int
    remat: str = "full"


STAGES = {"size": 4, "microbatches": 32}
KEPT = {"size": 8, "keep": "step"}
CASES = {
    "fsdp8": Case("h100:1x8", {"fsdp": 8}, 8192, 2),
    "fsdp128": Case("h100:16x8", {"fsdp": 128}, 8192, 2),
    "hsdp": Case("h100:16x8", {"data": 16, "fsdp": 8}, 8192, 2),
    "hsdp_at_end": Case("h100:16x8", {"data": {"size": 16, "reduce": "at_end"}, "fsdp": 8}, 8192, 2),
    "fsdp_tensor": Case("h100:16x8", {"fsdp": 16, "tensor": 8}, 4096, 1),
    "fsdp_tensor_kept": Case("h100:16x8", {"fsdp": {"size": 16, "keep": "step"}, "tensor": 8}, 4096, 1, remat="local"),
    "pipe_1f1b": Case("h100:16x8", {"pipe": STAGES, "fsdp": KEPT, "tensor": 4}, 8192, 8),
    "pipe_zb_h1": Case("h100:16x8", {"pipe": STAGES | {"schedule": "zb_h1"}, "fsdp": KEPT, "tensor": 4}, 8192, 8),
}
REMAT = "remat"
"""The case that compares `train.remat` on `fsdp8`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CASES, REMAT]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)}; default all")
    print("| case | step | step ms | exposed ms | of communication | temporary GB | peak GB | PFLOP |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for name in parser.parse_args().cases or names:
        if name == REMAT:
            for policy in REMAT_POLICIES:
                row(name, policy, CASES["fsdp8"], ours(CASES["fsdp8"], remat=policy))
            continue
        case = CASES[name]
        row(name, "spmdkit", case, ours(case))
        if name == "hsdp_at_end" or "pipe" in case.strategy:
            continue
        row(name, "spmdkit, bfloat16 sums", case, ours(case, reduce="bfloat16"))
        if "tensor" not in case.strategy:
            row(name, "hand-written", case, by_hand(case))
            row(name, "hand-written, bfloat16 sums", case, by_hand(case, reduce="bfloat16"))


def row(name: str, step: str, case: Case, compiled: Any) -> None:
    pipeline = lay_out_case(case, Precision(compute="bfloat16"))[1].pipeline
    timetable = pipeline.timetable if pipeline else None
    found = simulate(compiled.as_text(), parse_target(case.target), timetable=timetable)
    if pipeline and timetable:
        textbook = textbook_seconds(pipeline.schedule, timetable, found.parts)
        ratio = pipeline_seconds(timetable, found.parts) / textbook
        step += f", ticks {ratio:.3f} times the textbook's {textbook * 1e3:,.0f} ms"
    memory = compiled.memory_analysis()
    print(
        f"| {name} | {step} | {found.step_seconds * 1e3:,.0f} | {found.exposed_seconds * 1e3:.1f} "
        f"| {found.exposed_share:.1%} | {memory.temp_size_in_bytes / 1e9:.1f} "
        f"| {memory.peak_memory_in_bytes / 1e9:.1f} | {found.flops / 1e15:.3f} |",
        flush=True,
    )


def lay_out_case(case: Case, precision: Precision) -> tuple[Any, ShardingPlan]:
    """The model of a case and its layouts."""
    sizes = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "kv_heads": KV_HEADS, "mlp_width": MLP}
    model = transformer(TransformerConfig(length=case.length, vocabulary=VOCABULARY, rope_base=5e5, **sizes))
    return model, lay_out(model, case.strategy, precision=precision, devices=list_devices(target=case.target))


def ours(case: Case, reduce: str = "float32", remat: str = "") -> Any:
    """Our step for Llama-3 8B, as `spmdkit train` builds it."""
    precision = Precision(compute="bfloat16", reduce=reduce)
    model, plan = lay_out_case(case, precision)
    xla = XLA | default_options(plan)
    step = build_step(
        model, optax.adamw(3e-4), plan, clip_norm=1.0, remat=remat or case.remat, precision=precision, xla=xla
    )
    rows = case.rows * parse_target(case.target).size // case.strategy.get("tensor", 1)
    dtypes = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((rows, case.length), dtype) for name, dtype in dtypes.items()}
    return step.compile(batch | {"example": jax.ShapeDtypeStruct((rows,), jnp.int32)})


SHAPES = {
    "tokens": (VOCABULARY, WIDTH),
    "logits": (WIDTH, VOCABULARY),
    "norm": (WIDTH,),
    "blocks": {
        "query": (LAYERS, WIDTH, WIDTH),
        "key": (LAYERS, WIDTH, KV_HEADS * HEAD),
        "value": (LAYERS, WIDTH, KV_HEADS * HEAD),
        "out": (LAYERS, WIDTH, WIDTH),
        "gate": (LAYERS, WIDTH, MLP),
        "up": (LAYERS, WIDTH, MLP),
        "down": (LAYERS, MLP, WIDTH),
        "attention_norm": (LAYERS, WIDTH),
        "mlp_norm": (LAYERS, WIDTH),
    },
}


def by_hand(case: Case, reduce: str = "float32") -> Any:
    """The hand-written step with sums over `fsdp` in `reduce`, compiled for the target with the same options of XLA."""
    xla = XLA | default_options(lay_out_case(case, Precision(compute="bfloat16"))[1])
    target = parse_target(case.target)
    data, fsdp = case.strategy.get("data", 1), case.strategy["fsdp"]
    devices = np.array([*target_devices(case.target).values()]).reshape(data, fsdp)
    mesh = Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    specs = jax.tree_util.tree_map_with_path(spec_of, params)
    slots = jax.eval_shape(optimizer.init, params)
    slot_specs = optax.tree_utils.tree_map_params(
        optimizer, lambda _, spec: spec, slots, specs, transform_non_params=lambda _: P()
    )
    row_spec = P(("data", "fsdp"))

    def gradients(params: Any, tokens: Any) -> Any:
        varying = jax.tree.map(lambda leaf, spec: lax.pcast(leaf, without(spec), to="varying"), params, specs)
        loss, found = jax.value_and_grad(mean_loss)(varying, tokens, tokens.size * data * fsdp, reduce)
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
    tokens = jax.ShapeDtypeStruct((case.rows * target.size, case.length), jnp.int32)
    with compiling_for(target):
        return jitted.lower((params, slots), tokens).compile(compiler_options=xla)


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


if __name__ == "__main__":
    main()
