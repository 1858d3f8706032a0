"""`make bench`: our step against the same step written by hand, interleaved in one run, on 8 simulated devices.

    python benchmarks/compare.py [--case NAME] [--rounds 11] [--steps 1] [--host-steps 200] [--check] [--json FILE]

The model is the quickstart's: a byte-level transformer of 1 M parameters, 32 rows of 256 positions. Printed, for data
parallel, FSDP and their product:

    time     our step over each of the two hand-written ones: median over rounds of the ratio within a round, the order
             changing from round to round. Beside wall time stands the processor time of all threads of the process,
             which other programs on the machine disturb less.
    memory   bytes a device that the compiled step holds: arguments + outputs + temporaries - what is donated.
    traffic  the collectives of each compiled step.

and the host's own work (see host.py). The exit status is 1 with `--check` if a bar is missed: time at most 1.03 of the
faster hand-written step, memory at most that of the smaller, host work under 300 microseconds.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from spmdkit.mesh.simulate import simulate

simulate(8)

import handwritten  # noqa: E402
import host  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from spmdkit.mesh.device_mesh import DeviceMesh  # noqa: E402
from spmdkit.models.transformer import TransformerConfig, transformer  # noqa: E402
from spmdkit.parallel import FSDPConfig, build_step, census, lay_out  # noqa: E402

CASES = {"data 8": (8, 1), "fsdp 8": (1, 8), "data 2 x fsdp 4": (2, 4)}
CONFIG = TransformerConfig(vocabulary=256, length=256, layers=5, kv_heads=2, tied=True)
ROWS = 32
TIME_BAR, MEMORY_BAR, HOST_BAR = 1.03, 1.0, 300.0
THEIRS = {"jit": handwritten.jit_step, "shard_map": handwritten.shard_map_step}


def batch(sharding):
    """One batch of random tokens on the mesh."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocabulary, (ROWS, CONFIG.length + 1)).astype(np.int32)
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
        self.compiled = self.step.lower(self.state, self.batch).compile()

    def run(self):
        self.state, (loss, _, _) = self.step(self.state, self.batch)
        return loss


def seconds(contestant, steps):
    """Wall and processor seconds a step, all devices done."""
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        contestant.run()
    jax.block_until_ready(contestant.state)
    return (time.perf_counter() - wall) / steps, (time.process_time() - processor) / steps


def memory(compiled):
    """Bytes of one device."""
    sizes = compiled.memory_analysis()
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return total - sizes.alias_size_in_bytes


def race(contestants, rounds, steps):
    """Rounds of (wall, processor) seconds by contestant, interleaved."""
    names = list(contestants)
    times = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(seconds(contestants[name], steps))
    return {name: np.array(values) for name, values in times.items()}


def compare(case, rounds, steps):
    """Everything measured for one case, as numbers."""
    data, fsdp = CASES[case]
    model, optimizer = transformer(CONFIG), optax.adamw(1e-3)
    contestants = {"ours": Ours(model, optimizer, data, fsdp)}
    contestants |= {name: Theirs(model, optimizer, data, fsdp, make) for name, make in THEIRS.items()}
    losses = {name: float(contestant.run()) for name, contestant in contestants.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    times = race(contestants, rounds, steps)
    bytes_per_device = {name: memory(contestant.compiled) for name, contestant in contestants.items()}
    mesh = DeviceMesh.of(data=data, fsdp=fsdp)
    return {
        "case": case,
        "seconds": {name: np.median(values, axis=0).tolist() for name, values in times.items()},
        "time_ratios": {name: np.median(times["ours"] / times[name], axis=0).tolist() for name in THEIRS},
        "memory": bytes_per_device,
        "memory_ratio": bytes_per_device["ours"] / min(bytes_per_device[name] for name in THEIRS),
        "collectives": {name: list(map(str, census(c.compiled.as_text(), mesh))) for name, c in contestants.items()},
    }


def show(result):
    """Prints a case and returns the bars it missed."""
    case, ratios = result["case"], result["time_ratios"]
    for name, (wall, processor) in ratios.items():
        print(f"{case:<16} our step takes {wall:.3f} x the time of {name} ({processor:.3f} x its processor time)")
    print(f"{'':<16} and {result['memory_ratio']:.4f} x the memory of the smaller")
    for name, lines in result["collectives"].items():
        wall, processor = result["seconds"][name]
        took = f"{1e3 * wall:.0f} ms, {1e3 * processor:.0f} ms of processors"
        print(
            f"    {name:<10} {took}, {result['memory'][name]:,} bytes a device\n{'':<15}" + f"\n{'':<15}".join(lines),
            flush=True,
        )
    time_ratio = max(wall for wall, _ in ratios.values())
    missed = [f"{case}: time {time_ratio:.3f}"] * (time_ratio > TIME_BAR)
    return missed + [f"{case}: memory {result['memory_ratio']:.4f}"] * (result["memory_ratio"] > MEMORY_BAR)


def measure_host(steps):
    """The host's work with a program so small that the host's part shows."""
    config = TransformerConfig(vocabulary=64, length=16, layers=2, width=64, heads=2, mlp_width=64)
    model, optimizer = transformer(config), optax.adamw(1e-3)
    layouts = lay_out(model, {"data": 2, "fsdp": FSDPConfig(size=4)})
    mesh = handwritten.make_mesh(2, 4)
    state, by_hand = handwritten.first_state(model, optimizer, mesh)
    bare = handwritten.shard_map_step(model, optimizer, mesh, by_hand)
    return {
        "ours": host.of_loop(build_step(model, optimizer, layouts, clip_norm=1.0), config, steps),
        "bare": host.of_bare_loop(bare, state, mesh, config, steps),
    }


def show_host(result):
    """Prints the host's work and returns the bar it missed."""
    ours, bare = result["ours"], result["bare"]
    print(f"host work: {ours.between:.0f} microseconds a step from one dispatch to the next, of the main thread")
    print(f"    a bare loop around the hand-written step: {bare.between:.0f} (freeing the old state, waiting)")
    print(f"    dispatching: ours {ours.dispatch:.0f}, the hand-written step {bare.dispatch:.0f} microseconds")
    print(f"    the data thread beside it: {ours.data_thread:.0f} microseconds")
    return [f"host work {ours.between:.0f} microseconds"] * bool(ours.between > HOST_BAR)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="only this one (may be repeated)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=1, help="steps of one contestant in one round")
    parser.add_argument("--host-steps", type=int, default=500)
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    print(f"JAX {jax.__version__}, 8 simulated CPU devices")
    missed, results = [], []
    for case in arguments.case or CASES:
        results.append(compare(case, arguments.rounds, arguments.steps))
        missed += show(results[-1])
    work = measure_host(arguments.host_steps)
    missed += show_host(work)
    if arguments.json:
        figures = {"cases": results, "host": {name: value._asdict() for name, value in work.items()}}
        arguments.json.write_text(json.dumps(figures, indent=2))
    print("bars missed: " + ("; ".join(missed) or "none"))
    return int(bool(missed) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
