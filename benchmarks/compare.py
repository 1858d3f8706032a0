"""`make bench`: our step against the same step written by hand, interleaved in one run, on 8 simulated devices.

    python benchmarks/compare.py [--case NAME] [--rounds 11] [--steps 1] [--small] [--no-host] [--check] [--json FILE]

The model is a byte-level transformer of 1 M parameters, 32 rows of 256 positions; `cases.py` lists the cases and the
contestants of each. Printed, for each of ours:

    time         our step over each of the hand-written ones: median over rounds of the ratio within a round, the order
                 changing from round to round. Beside wall time stands the processor time of all threads of the process,
                 which other programs on the machine disturb less.
    memory       bytes a device that the compiled step holds, over those of the smallest hand-written one.
    collectives  of each compiled step, and whether ours are exactly those that `Step.cost` predicts.

and the host's own work (see host.py). All contestants of a case have to agree in the loss. The exit status is 1 with
`--check` if a bar is missed: time at most 1.03 of the faster hand-written step, memory at most that of the smaller,
collectives as predicted, host work under 300 microseconds.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from spmdkit.mesh.devices import simulate

simulate(8)

import handwritten  # noqa: E402
import host  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from cases import CASES, ROWS, SMALL, SMALL_ROWS  # noqa: E402
from contestants import enter, memory  # noqa: E402
from spmdkit.models.transformer import TransformerConfig, transformer  # noqa: E402
from spmdkit.parallel import FSDPConfig, build_step, lay_out  # noqa: E402

TIME_BAR, MEMORY_BAR, HOST_BAR = 1.03, 1.0, 300.0


def seconds(contestant, steps):
    """Wall and processor seconds a step, all devices done."""
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        contestant.run()
    jax.block_until_ready(contestant.state)
    return (time.perf_counter() - wall) / steps, (time.process_time() - processor) / steps


def race(contestants, rounds, steps):
    """Rounds of (wall, processor) seconds by contestant, interleaved."""
    names = list(contestants)
    times = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(seconds(contestants[name], steps))
    return {name: np.array(values) for name, values in times.items()}


def compare(name, rounds, steps, *, small):
    """Everything measured for one case, as numbers."""
    case = CASES[name]
    case = case._replace(config=replace(case.config, **SMALL)) if small else case
    contestants = enter(case, optax.adamw(1e-3), SMALL_ROWS if small else ROWS)
    losses = {each: float(contestant.run()) for each, contestant in contestants.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    times = race(contestants, rounds, steps)
    held = {each: memory(contestant.compiled) for each, contestant in contestants.items()}
    return {
        "case": name,
        "seconds": {each: np.median(values, axis=0).tolist() for each, values in times.items()},
        "time_ratios": {
            ours: {theirs: np.median(times[ours] / times[theirs], axis=0).tolist() for theirs in case.theirs}
            for ours in case.ours
        },
        "memory": held,
        "memory_ratios": {ours: held[ours] / min(held[theirs] for theirs in case.theirs) for ours in case.ours},
        "collectives": {each: list(map(str, contestant.collectives)) for each, contestant in contestants.items()},
        "predicted": {each: list(map(str, contestants[each].predicted)) for each in case.ours},
    }


def show(result):
    """Prints a case and returns the bars it missed."""
    print(result["case"])
    missed = [f"{result['case']}, {bar}" for name in result["time_ratios"] for bar in _show_ours(result, name)]
    for name, lines in result["collectives"].items():
        wall, processor = result["seconds"][name]
        took = f"{1e3 * wall:.0f} ms, {1e3 * processor:.0f} ms of processors"
        print(f"    {name:<17} {took}, {result['memory'][name]:,} bytes a device")
        print("".join(f"{'':<22}{line}\n" for line in lines), end="", flush=True)
    return missed


def _show_ours(result, name):
    ratios, size = result["time_ratios"][name], result["memory_ratios"][name]
    for theirs, (wall, processor) in ratios.items():
        print(f"    {name:<9} takes {wall:.3f} x the time of {theirs} ({processor:.3f} x its processor time)")
    predicted = result["collectives"][name] == result["predicted"][name]
    print(f"    {'':<9} and {size:.4f} x the memory of the smallest", end="; ")
    print("its collectives are those predicted" if predicted else f"it predicted {result['predicted'][name]}")
    slowest = max(wall for wall, _ in ratios.values())
    missed = {
        f"{name}: time {slowest:.3f}": slowest > TIME_BAR,
        f"{name}: memory {size:.4f}": size > MEMORY_BAR,
        f"{name}: collectives": not predicted,
    }
    return [bar for bar, is_missed in missed.items() if is_missed]


def measure_host(steps):
    """The host's work with a program so small that the host's part shows."""
    config = TransformerConfig(vocabulary=64, length=16, layers=2, width=64, heads=2, mlp_width=64)
    model, optimizer = transformer(config), optax.adamw(1e-3)
    layouts = lay_out(model, {"data": 2, "fsdp": FSDPConfig(size=4)})
    bare = handwritten.by_shard_map(config, optimizer, data=2, fsdp=4)
    return {
        "ours": host.of_loop(build_step(model, optimizer, layouts, clip_norm=1.0), config, steps),
        "bare": host.of_bare_loop(bare, config, steps),
    }


def show_host(result):
    """Prints the host's work and returns the bar it missed."""
    ours, bare = result["ours"], result["bare"]
    print(f"host work: {ours.between:.0f} microseconds a step from one dispatch to the next, of the main thread")
    print(f"    {ours.mean:.0f} on average, with the metrics that every fourth step reads")
    print(f"    a bare loop around the hand-written step: {bare.between:.0f} (freeing the old state, waiting)")
    print(f"    dispatching: ours {ours.dispatch:.0f}, the hand-written step {bare.dispatch:.0f} microseconds")
    print(f"    the data thread beside it: {ours.data_thread:.0f} microseconds")
    return [f"host work {ours.between:.0f} microseconds"] * bool(ours.between > HOST_BAR)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="only this one (may be repeated)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=1, help="steps of one contestant in one round")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--host-steps", type=int, default=500)
    parser.add_argument("--no-host", action="store_true", help="leave the host's work out")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    print(f"JAX {jax.__version__}, 8 simulated CPU devices{', tiny sizes' if arguments.small else ''}")
    figures, missed = {"cases": []}, []
    if not arguments.no_host:  # first: a process that has compiled and run much else has other things in its caches
        work = measure_host(arguments.host_steps)
        figures["host"] = {name: value._asdict() for name, value in work.items()}
        missed += show_host(work)
    for case in arguments.case or CASES:
        figures["cases"].append(compare(case, arguments.rounds, arguments.steps, small=arguments.small))
        missed += show(figures["cases"][-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))
    print("bars missed: " + ("; ".join(missed) or "none"))
    return int(bool(missed) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
