"""Compares our step with a hand-written one for H100s that are not here: `python benchmarks/targets.py [CASE ...]`.

Both are compiled by XLA for the target and simulated by `planning/timeline.py`; nothing runs on a GPU. The hand-written
step (`handwritten_gpu.py`) is compiled twice, as ours is: with gradients reduce-scattered in float32 and in bfloat16.

Needs the compiler: `make test-targets` installs it into build/targets, so run it with PYTHONPATH=build/targets.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from handwritten_gpu import HEADS, KV_HEADS, MLP, VOCABULARY, WIDTH, handwritten
from spmdkit.mesh.targets import compiling_for, parse_target, target_devices
from spmdkit.models import TransformerConfig, transformer
from spmdkit.parallel.blocks.gathered_block import REMAT_POLICIES
from spmdkit.planning.pipeline_time import pipeline_seconds, textbook_seconds
from spmdkit.planning.timeline import simulate
from spmdkit.runtime.compilation import default_options

from spmdkit import Precision, ShardingPlan, build_step, lay_out, list_devices

LAYERS = 32
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


def by_hand(case: Case, reduce: str = "float32") -> Any:
    """The hand-written step with sums over `fsdp` in `reduce`, compiled for the target with the same options of XLA."""
    xla = XLA | default_options(lay_out_case(case, Precision(compute="bfloat16"))[1])
    target, devices = parse_target(case.target), [*target_devices(case.target).values()]
    sizes = case.strategy.get("data", 1), case.strategy["fsdp"]
    step = handwritten(LAYERS, *sizes, case.length, case.rows * target.size, devices, reduce)
    with compiling_for(target):
        return step.jitted.lower(step.state, step.tokens).compile(compiler_options=xla)


if __name__ == "__main__":
    main()
