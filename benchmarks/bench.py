"""`make bench`: our step against the same step written by hand, interleaved in one run, on 8 simulated devices.

Prints, for data parallel, FSDP and their product: the step time as a ratio to the faster of the two hand-written ones
(median over rounds of the ratio within the round), compiled memory per device, the collectives of each, and the host's
own work per step. Exits 1 if a bar is missed and `--check` is given.

    python benchmarks/bench.py [--rounds 15] [--steps 4] [--check] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from spmdkit.mesh.simulate import simulate

simulate(8)

import handwritten  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from spmdkit.models.transformer import TransformerConfig, transformer  # noqa: E402
from spmdkit.parallel import FSDPConfig, build_step, census, lay_out  # noqa: E402
from spmdkit.mesh.device_mesh import DeviceMesh  # noqa: E402

CASES = {"data 8": (8, 1), "fsdp 8": (1, 8), "data 2 x fsdp 4": (2, 4)}
CONFIG = TransformerConfig(vocabulary=256, length=128, layers=4, width=128, heads=4, kv_heads=2, mlp_width=384)
ROWS = 16
TIME_BAR, MEMORY_BAR, HOST_BAR_MICROSECONDS = 1.03, 1.0, 300.0


def batch(sharding):
    random = np.random.default_rng(0)
    tokens = random.integers(0, CONFIG.vocabulary, (ROWS, CONFIG.length + 1)).astype(np.int32)
    arrays = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((ROWS, CONFIG.length), np.float32),
        "example": np.arange(ROWS, dtype=np.int32),
    }
    return {name: jax.device_put(array, sharding) for name, array in arrays.items()}


class Ours:
    """The runtime's step."""

    def __init__(self, model, optimizer, data, fsdp):
        layouts = lay_out(model, {"data": data, "fsdp": FSDPConfig(size=fsdp)})
        self.step = build_step(model, optimizer, layouts)
        self.batch = batch(layouts.batch_sharding())
        abstract = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in self.batch.items()}
        self.compiled = self.step.lower(abstract).compile()
        self.state = self.step.init(0)

    def run(self):
        self.state, metrics = self.step(self.state, self.batch)
        return metrics.loss


class Theirs:
    """A hand-written step."""

    def __init__(self, model, optimizer, data, fsdp, make):
        mesh = handwritten.make_mesh(data, fsdp)
        self.batch = batch(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp"))))
        self.state, layouts = handwritten.first_state(model, optimizer, mesh)
        self.step = make(model, optimizer, mesh, layouts)
        self.compiled = self.step.lower(*self.state, self.batch).compile()

    def run(self):
        *self.state, loss, _ = self.step(*self.state, self.batch)
        return loss


def seconds(contestant, steps):
    start = time.perf_counter()
    for _ in range(steps):
        loss = contestant.run()
    loss.block_until_ready()
    return (time.perf_counter() - start) / steps


def memory(compiled):
    sizes = compiled.memory_analysis()
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return total - sizes.alias_size_in_bytes


def compare(name, data, fsdp, rounds, steps):
    model, optimizer = transformer(CONFIG), optax.adamw(1e-3)
    contestants = {
        "ours": Ours(model, optimizer, data, fsdp),
        "jit": Theirs(model, optimizer, data, fsdp, handwritten.jit_step),
        "shard_map": Theirs(model, optimizer, data, fsdp, handwritten.shard_map_step),
    }
    losses = {who: float(contestant.run()) for who, contestant in contestants.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    times = {who: [] for who in contestants}
    for round_ in range(rounds):
        order = list(contestants)[round_ % 3 :] + list(contestants)[: round_ % 3]
        for who in order:
            times[who].append(seconds(contestants[who], steps))
    medians = {who: statistics.median(values) for who, values in times.items()}
    best = min(("jit", "shard_map"), key=lambda who: medians[who])
    ratio = statistics.median(ours / theirs for ours, theirs in zip(times["ours"], times[best], strict=True))
    mesh = DeviceMesh.of(data=data, fsdp=fsdp)
    return {
        "case": name,
        "time_ratio": ratio,
        "best": best,
        "milliseconds": {who: 1e3 * value for who, value in medians.items()},
        "memory": {who: memory(contestant.compiled) for who, contestant in contestants.items()},
        "collectives": {who: list(map(str, census(c.compiled.as_text(), mesh))) for who, c in contestants.items()},
    }


def host_microseconds(steps=200):
    """CPU time of the dispatching thread per step of the loop, batches from the data pipeline and logging included."""
    from spmdkit.data.arrays import from_arrays
    from spmdkit.data.batches import train_batches
    from spmdkit.training.loop import run_steps

    config = TransformerConfig(vocabulary=64, length=16, layers=2, width=32, heads=2, kv_heads=1, mlp_width=64)
    model = transformer(config)
    layouts = lay_out(model, {"data": 2, "fsdp": FSDPConfig(size=4, floor_bytes=1024)})
    step = build_step(model, optax.adamw(1e-3), layouts, clip_norm=1.0)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 64, (512, 16)).astype(np.int32)
    weights = np.ones((512, 16), np.float32)
    source = from_arrays({"inputs": tokens, "targets": tokens, "weights": weights}).train
    marks = []

    def spy(batches):
        for made in batches:
            marks.append(time.thread_time())
            yield made

    batches = train_batches(source, layouts.batch_sharding(), global_batch=16, seed=0, start_step=0, num_steps=steps)
    run_steps(step, step.init(0), spy(batches), log_every=10)
    return 1e6 * statistics.median(np.diff(marks)[20:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    missed = []
    results = []
    for name, (data, fsdp) in CASES.items():
        result = compare(name, data, fsdp, arguments.rounds, arguments.steps)
        results.append(result)
        memory_ratio = result["memory"]["ours"] / min(result["memory"]["jit"], result["memory"]["shard_map"])
        times = "  ".join(f"{who} {value:.1f} ms" for who, value in result["milliseconds"].items())
        print(f"{name:<16} time {result['time_ratio']:.3f} x {result['best']} ({times})  memory {memory_ratio:.3f} x the least")
        for who, lines in result["collectives"].items():
            print(f"    {who:<10} memory {result['memory'][who]:,} bytes; " + "; ".join(lines))
        missed += [f"{name}: time {result['time_ratio']:.3f}"] * (result["time_ratio"] > TIME_BAR)
        missed += [f"{name}: memory {memory_ratio:.3f}"] * (memory_ratio > MEMORY_BAR)
    host = host_microseconds()
    print(f"host work per step: {host:.0f} microseconds of the dispatching thread")
    missed += [f"host work {host:.0f} microseconds"] * (host > HOST_BAR_MICROSECONDS)
    if arguments.json:
        arguments.json.write_text(json.dumps({"cases": results, "host_microseconds": host}, indent=2))
    print("bars missed: " + ("; ".join(missed) or "none"))
    return int(bool(missed) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
