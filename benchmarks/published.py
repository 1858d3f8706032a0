"""Compares predicted with published throughput: `python benchmarks/published.py [ROW ...]`.

Each row is a published training run: the same model, number of GPUs, layout, precision, sequence length and batch, as
far as our strategies can express them. Our step is compiled for these GPUs and simulated with the one set of factors of
`planning/kernel_time.py`; nothing runs on a GPU. torchtitan's activation checkpointing, which drops every other matrix
product, becomes `train.remat: selective`, which drops two of seven, the largest. Megatron-LM's drops none: `dots`.

torchtitan: its repository, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 and 3) and
asyncTP_llama3_h100_2025-06_torchtitan.md. Megatron-LM: the model table of its README; its TFLOP/s count the products of
the model without recomputation, and causal attention as if it were full.

Needs the compiler: `make test-targets` installs it into build/targets, so run it with PYTHONPATH=build/targets.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.configs import load_config
from spmdkit.planning.run_plan import plan_run

CARD_500W = Path(__file__).parent / "h100_500w.yaml"
MAX_ERROR = 0.20
VOCABULARY, LENGTH = 131_072, 4_096
"""Of Megatron-LM's runs."""


class Row(NamedTuple):
    """One published run.

    Attributes:
        target: Its GPUs.
        config: The preset and the overrides that describe it.
        tokens_per_second: The published tokens per second of one GPU.
    """

    target: str
    config: list[str]
    tokens_per_second: float


def torchtitan(preset: str, hosts: int, strategy: str, batch: int, remat: str, tokens_per_second: float) -> Row:
    """A run of Llama 3 with 8,192 positions."""
    overrides = [f"strategy={strategy}", f"train.global_batch={batch}", f"train.remat={remat}"]
    return Row(f"{CARD_500W}:{hosts}x8", [preset, *overrides], tokens_per_second)


SPLIT_OPTIMIZER = "data: {size: 48, zero: 1}"
GATHERED_ONCE = "fsdp: {size: 48, keep: step}"


def megatron(
    hosts: int, heads: int, width: int, layers: int, strategy: str, batch: int, teraflops: float, remat: str = "dots"
) -> Row:
    """A run of a GPT with 4,096 positions, whose layers have 12 x width^2 parameters.

    Megatron-LM splits the optimizer over 48 devices, and gathers parameters in bfloat16 once per step, as
    `GATHERED_ONCE` does if 48 divides a dim of each parameter. Otherwise, `SPLIT_OPTIMIZER` is the closest.
    """
    model = {
        **{"heads": heads, "width": width, "layers": layers, "tied": "false", "positions": "learned"},
        **{"mlp": "gelu", "mlp_bias": "true", "attention_bias": "all", "norm": "layer"},
    }
    overrides = [f"model.{key}={value}" for key, value in model.items()]
    overrides += [f"data.vocabulary={VOCABULARY}", f"data.length={LENGTH}", f"train.global_batch={batch}"]
    flops = 72 * layers * width**2 * (1 + LENGTH / (6 * width) + VOCABULARY / (12 * layers * width))
    overrides += [f"strategy={{{strategy}}}", f"train.remat={remat}"]
    return Row(f"h100:{hosts}x8", ["gpt2_124m", *overrides], teraflops * 1e12 / flops)


OVERLAPPED = "tensor: {size: 8, collective_matmul: true}"
ROWS = {
    "torchtitan 8B, FSDP 8": torchtitan("llama3_8b", 1, "{fsdp: 8}", 16, "selective", 6667),
    "torchtitan 8B, FSDP 128": torchtitan("llama3_8b", 16, "{fsdp: 128}", 256, "selective", 6514),
    "torchtitan 8B, FSDP 8 x TP 8": torchtitan("llama3_8b", 8, "{fsdp: 8, tensor: 8}", 96, "selective", 4378),
    "torchtitan 8B, FSDP 8 x TP 8, overlapped": torchtitan(
        "llama3_8b", 8, f"{{fsdp: 8, {OVERLAPPED}}}", 96, "selective", 4809
    ),
    "torchtitan 70B, FSDP 32 x TP 8": torchtitan("llama3_70b", 32, "{fsdp: 32, tensor: 8}", 512, "full", 597),
    "torchtitan 70B, FSDP 32 x TP 8, overlapped": torchtitan(
        "llama3_70b", 32, f"{{fsdp: 32, {OVERLAPPED}}}", 512, "full", 652
    ),
    "Megatron-LM 1.7B, DP 48": megatron(6, 16, 2048, 24, SPLIT_OPTIMIZER, 192, 408.8),
    "Megatron-LM 16B, DP 48 x TP 4": megatron(
        24, 48, 6144, 32, f"{GATHERED_ONCE}, tensor: {{size: 4, collective_matmul: true}}", 192, 489.1
    ),
    "Megatron-LM 70B, DP 48 x TP 8 x PP 2": megatron(
        96,
        64,
        8192,
        84,
        f"{SPLIT_OPTIMIZER}, tensor: 8, pipe: {{size: 2, schedule: 1f1b, microbatches: 8}}",
        384,
        419.7,
    ),
    "Megatron-LM 314B, DP 48 x TP 8 x PP 8": megatron(
        384,
        128,
        16384,
        96,
        f"{SPLIT_OPTIMIZER}, tensor: 8, pipe: {{size: 8, schedule: 1f1b, microbatches: 32}}",
        1536,
        474.4,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {'; '.join(ROWS)}; default all")
    print("| published run | GPUs | remat | published tokens/s, GPU | predicted | ratio | peak GiB | exposed |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    close = []
    for name in parser.parse_args().rows or ROWS:
        ratio = print_row(name, ROWS[name])
        close.append(abs(ratio - 1) <= MAX_ERROR)
    print(f"\n{sum(close)} of {len(close)} within {MAX_ERROR:.0%}")


def print_row(name: str, row: Row) -> float:
    """Prints one row of the table and returns predicted / published."""
    config = load_config(row.config[0], row.config[1:], sizes=False)
    plan = plan_run(config, row.target)
    predicted: Any = plan.tokens_per_second_per_device
    ratio = predicted / row.tokens_per_second
    exposed = plan.to_json()["exposed_communication"]
    print(
        f"| {name} | {plan.target.size:,} | {config.train.remat} | {row.tokens_per_second:,.0f} | {predicted:,.0f} "
        f"| {ratio:.2f} | {plan.peak_bytes / 2**30:.1f} | {exposed:.0%} |",
        flush=True,
    )
    return ratio


if __name__ == "__main__":
    main()
