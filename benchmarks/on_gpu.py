"""Measures steps on the GPU of this machine next to their plans: `python benchmarks/on_gpu.py [CASE ...]`.

Blocks of Llama-3 8B in full width, as many as fit on one GPU with their state, a block of Mixtral, and GPT-2 124M. For
each case: the time of a step (the median of `--steps`), the time that `planning/timeline.py` predicts for the same
compiled program, the model FLOP utilization, and the memory: the most that the allocator has counted in this process,
next to the compiled peak. `--trace FOLDER` also writes the time of each kernel of a case, measured and predicted.

`check_gpu.py` checks the numbers.
"""

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from handwritten_gpu import HEADS, KV_HEADS, MLP, VOCABULARY, WIDTH, handwritten
from spmdkit.mesh.targets import Target, parse_target
from spmdkit.models import MoEConfig, TransformerConfig, moe, transformer
from spmdkit.planning.timeline import simulate
from spmdkit.planning.trace import COMPUTE, MAX_EVENTS, Recorder
from spmdkit.runtime.compilation import default_options

from spmdkit import Precision, build_step, lay_out

CARDS = {"H100": "h100", "H200": "h200", "B200": "b200", "A100": "a100-80"}
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""Kernels start one by one, so that the profiler knows the instruction of each."""
WARMUP = 2


class Case(NamedTuple):
    """A model, its rows and what backward recomputes."""

    config: TransformerConfig
    rows: int
    remat: str = "full"
    by_hand: bool = False


def llama(layers: int, length: int = 8192, **options: Any) -> TransformerConfig:
    sizes = {"width": WIDTH, "heads": HEADS, "kv_heads": KV_HEADS, "mlp_width": MLP, "vocabulary": VOCABULARY}
    return TransformerConfig(layers=layers, length=length, rope_base=5e5, **sizes, **options)


GPT2 = TransformerConfig(
    **{"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "length": 1024, "mlp": "gelu", "norm": "layer"},
    **{"mlp_bias": True, "attention_bias": "all", "positions": "learned", "tied": True},
)
MIXTRAL = MoEConfig(
    **{"layers": 1, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336, "vocabulary": 32000, "length": 4096},
    **{"rope_base": 1e6, "experts": 8, "top_k": 2},
)
CASES = {
    "gpt2": Case(GPT2, 32, "dots"),
    "mixtral": Case(MIXTRAL, 4),
    "llama": Case(llama(4), 2),
    "llama by hand": Case(llama(4), 2, by_hand=True),
    "llama selective": Case(llama(4), 2, "selective"),
    "llama dots": Case(llama(4), 2, "dots"),
    "llama none": Case(llama(4), 2, "none"),
    "llama 4k": Case(llama(4, 4096), 4),
    "llama xla": Case(llama(4, attention="xla"), 2),
    "llama 8 blocks": Case(llama(8), 2),
    "llama whole": Case(llama(32), 1),
}
"""Those of the least memory first, because the allocator's maximum cannot be reset. `llama whole` needs 131 GB."""


class Program(NamedTuple):
    """A compiled step with its arguments: `run(state, batch) -> state, loss`."""

    compiled: Any
    run: Any
    state: Any
    batch: Any
    flops: float
    compile_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name in CASES if name != "llama whole"]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default all but the last")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3600, help="start no case after this time")
    parser.add_argument("--trace", type=Path, help="write the kernels of each case into this folder")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    device = jax.devices("gpu")[0]
    card = next(each for name, each in CARDS.items() if name in device.device_kind)
    target, rows, start = parse_target(f"{card}:1x1"), {}, time.perf_counter()
    print(f"JAX {jax.__version__}, {device.device_kind}, predicted for {target.text}")
    print("| case | step ms | predicted ms | ratio | MFU | peak GB | compiled GB | compile s | loss |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in arguments.cases or default:
        if time.perf_counter() - start > arguments.seconds:
            break
        try:
            rows[name] = measure(CASES[name], target, arguments.steps)
            show(name, rows[name])
            if arguments.trace:
                arguments.trace.mkdir(parents=True, exist_ok=True)
                trace(CASES[name], target, arguments.trace / f"{name.replace(' ', '_')}.json.gz")
        except Exception as error:  # the next case may fit
            print(f"| {name} | {type(error).__name__}: {str(error)[:300]} |", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2))


def measure(case: Case, target: Target, steps: int) -> dict[str, float]:
    """Returns the measured and the predicted figures of a case."""
    program = build(case)
    predicted = simulate(program.compiled.as_text(), target)
    state, times, loss = program.state, [], 0.0
    for _ in range(WARMUP + steps):
        start = time.perf_counter()
        state, loss = program.run(state, program.batch)
        loss = float(loss)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[WARMUP:])
    peak = (jax.devices("gpu")[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "seconds": seconds,
        "fastest": min(times[WARMUP:]),
        "slowest": max(times[WARMUP:]),
        "predicted_seconds": predicted.step_seconds,
        "mfu": program.flops / seconds / target.card.flops["bfloat16"],
        "peak_bytes": peak,
        "compiled_bytes": program.compiled.memory_analysis().peak_memory_in_bytes,
        "compile_seconds": program.compile_seconds,
        "loss": loss,
    }


def show(name: str, row: dict[str, float]) -> None:
    """Prints a row of the table."""
    print(
        f"| {name} | {row['seconds'] * 1e3:,.1f} | {row['predicted_seconds'] * 1e3:,.1f} "
        f"| {row['predicted_seconds'] / row['seconds']:.2f} | {row['mfu']:.1%} | {row['peak_bytes'] / 1e9:.2f} "
        f"| {row['compiled_bytes'] / 1e9:.2f} | {row['compile_seconds']:.0f} | {row['loss']:.4f} |",
        flush=True,
    )


def build(case: Case, **xla: Any) -> Program:
    """Compiles a case with more options of XLA, and draws its state."""
    build_case = _by_hand if case.by_hand else _ours
    return build_case(case, xla)


def _ours(case: Case, xla: dict[str, Any]) -> Program:
    precision = Precision(compute="bfloat16")
    model = (moe if isinstance(case.config, MoEConfig) else transformer)(case.config)
    plan = lay_out(model, {}, precision=precision, devices=["gpu:0"])
    options = default_options(plan) | xla
    step = build_step(model, optax.adamw(3e-4), plan, clip_norm=1.0, remat=case.remat, precision=precision, xla=options)
    tokens = _tokens(case)
    batch = {
        "inputs": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "weights": np.ones(tokens.shape, np.float32),
        "example": np.arange(case.rows, dtype=np.int32),
    }
    start = time.perf_counter()
    compiled = step.compile({name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()})
    seconds = time.perf_counter() - start

    def run(state: Any, batch: Any) -> Any:
        state, metrics = step(state, batch)
        return state, metrics.loss

    on_device = jax.device_put(batch, plan.batch_sharding())
    return Program(compiled, run, step.init(0), on_device, (model.flops_per_row or 0) * case.rows, seconds)


def _by_hand(case: Case, xla: dict[str, Any]) -> Program:
    config = case.config
    step = handwritten(config.layers, 1, 1, config.length, case.rows, jax.devices("gpu")[:1], "float32")
    plan = lay_out(transformer(config), {}, devices=["gpu:0"])
    start = time.perf_counter()
    compiled = step.jitted.lower(step.state, step.tokens).compile(compiler_options=default_options(plan) | xla)
    seconds = time.perf_counter() - start

    def draw(key: Any) -> Any:
        params, slots = step.state
        leaves, tree = jax.tree.flatten_with_path(params)
        keys = jax.random.split(key, len(leaves))
        drawn = [
            jnp.ones(leaf.shape) if "norm" in path[-1].key else 0.02 * jax.random.normal(one, leaf.shape)
            for one, (path, leaf) in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, drawn), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), slots)

    state, batch = jax.jit(draw, out_shardings=compiled.input_shardings[0][0])(jax.random.key(0)), _tokens(case)
    batch = jax.device_put(batch, compiled.input_shardings[0][1])
    return Program(compiled, compiled, state, batch, (transformer(config).flops_per_row or 0) * case.rows, seconds)


def _tokens(case: Case) -> np.ndarray:
    shape = case.rows, case.config.length
    return np.random.default_rng(0).integers(0, case.config.vocabulary, shape).astype(np.int32)


def trace(case: Case, target: Target, path: Path) -> None:
    """Writes the kernels of one step, by instruction: runs and seconds, measured and predicted, and the program."""
    program, recorder = build(case, **NO_GRAPHS), Recorder(MAX_EVENTS)
    state = program.state
    for _ in range(WARMUP):
        state, _ = program.run(state, program.batch)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            state, loss = program.run(state, program.batch)
            jax.block_until_ready((state, loss))
            seconds = time.perf_counter() - start
        events = json.loads(gzip.decompress(next(Path(folder).rglob("*.trace.json.gz")).read_bytes()))["traceEvents"]
    text = program.compiled.as_text()
    simulate(text, target, recorder=recorder)
    kernels: dict[str, dict[str, float]] = defaultdict(lambda: {"runs": 0, "seconds": 0.0, "predicted": 0.0})
    names: dict[str, str] = {}
    for event in events:
        if op := event.get("args", {}).get("hlo_op"):
            kernels[op]["runs"] += 1
            kernels[op]["seconds"] += event["dur"] * 1e-6
            names[op] = event["name"]
    for event in recorder.events:
        if event.queue == COMPUTE:
            kernels[event.name]["predicted"] += event.seconds
    path.write_bytes(
        gzip.compress(json.dumps({"seconds": seconds, "kernels": kernels, "names": names, "program": text}).encode())
    )


if __name__ == "__main__":
    main()
