"""What the guards of a run cost: the same steps with all of them on and with all of them off, in one run, by turns.

    python benchmarks/guards.py                         4 processes of one device each on this machine
    python benchmarks/guards.py --processes 2 --steps 200

On: the gate for signals, the notes of the watchdog and its thread, the search for slow processes, a comparison of
copies every 100 steps, the ledger. Off: the loop alone. One compiled step serves both. Turns alternate, and so does who
goes first in a pair; a figure is the median over pairs, so that what else the machine does falls on both alike.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

REPLICAS_EVERY = 100


def main() -> None:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="of a turn")
    parser.add_argument("--pairs", type=int, default=10, help="of turns, one on and one off")
    parser.add_argument("--rows", type=int, default=16, help="of a batch")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        measure(arguments)
        return
    from spmdkit.launch.supervision.ports import free_port
    from spmdkit.training.worker import Job, job_environment

    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        workers = [
            subprocess.Popen(command, env=os.environ | job_environment(Job(address, arguments.processes, rank, 1)))
            for rank in range(arguments.processes)
        ]
        codes = [worker.wait() for worker in workers]
    sys.exit(max(codes))


def measure(arguments: argparse.Namespace) -> None:
    """Runs the turns in one process; process 0 prints the figures."""
    from spmdkit.configs import load_config
    from spmdkit.launch.run.build import build, prepare_devices
    from spmdkit.launch.run.guards import Guards
    from spmdkit.mesh.processes import is_main_process
    from spmdkit.training.worker import multi_process

    given = [
        f"run.dir={arguments.folder}/run",
        f"strategy={{data: {arguments.processes}}}",
        f"train.global_batch={arguments.rows}",
        "train.steps=1000000",
        "data.source=synthetic",
        "model={name: mlp, classes: 10, widths: [512, 512]}",
        f"guards.replicas_every={REPLICAS_EVERY}",
    ]
    config = load_config("quickstart", given, num_processes=arguments.processes, simulate=1)
    prepare_devices(config)
    with multi_process(config.timeouts):
        built = build(config)
        built.step.compile(built.batch)
        folder = Path(arguments.folder)
        guards = Guards(config, lambda line: None, lambda number: False)
        guards.open(built, folder, 0)
        turns = Turns(built, guards, arguments.steps)
        turns.run(on=True), turns.run(on=False)  # connections and caches
        pairs = [turns.pair(on_first=number % 2 == 0) for number in range(arguments.pairs)]
        if is_main_process():
            report(pairs, arguments)


class Turns:
    """The same steps again and again, guarded or not."""

    def __init__(self, built: Any, guards: Any, steps: int) -> None:
        from spmdkit.data.batches import train_batches

        self.built, self.guards, self.steps = built, guards, steps
        self.state = built.step.init(0)
        self.done = 0
        rows = built.config.train.global_batch
        batches = train_batches(
            built.splits.train, built.layouts.batch_sharding(), global_batch=rows, seed=0, start_step=0, num_steps=1
        )
        (self.batch,) = batches

    def pair(self, *, on_first: bool) -> tuple[list[float], list[float]]:
        """Times of the steps of one turn on, and of one off."""
        if on_first:
            return self.run(on=True), self.run(on=False)
        off = self.run(on=False)
        return self.run(on=True), off

    def run(self, *, on: bool) -> list[float]:
        """Seconds of each step of a turn."""
        from spmdkit.training.loop import run_steps

        times = [time.perf_counter()]
        start, guards = self.done, self.guards
        batches = [self.batch] * self.steps
        with ExitStack() as stack:
            options: dict[str, Any] = {"after_step": lambda number, state: times.append(time.perf_counter())}
            step: Any = self.built.step
            if on:
                gate = stack.enter_context(guarded(guards))
                step, batches = guards.step(step), guards.batches(batches, start)

                def after(number: int, state: Any) -> None:
                    guards.after_step(number, state)
                    times.append(time.perf_counter())

                options = {"after_step": after, "waited": guards.waited, "may_start": gate.passes}
            self.state = run_steps(step, self.state, batches, start=start, log_every=10, **options)
        self.done += self.steps
        return [end - begin for begin, end in itertools.pairwise(times)]


@contextmanager
def guarded(guards: Any) -> Iterator[Any]:
    """All threads of the guards, for one turn."""
    from spmdkit.training.stopping import stops_on_signals

    with stops_on_signals() as gate, guards.watchdog.watching():
        yield gate


def report(pairs: list[tuple[list[float], list[float]]], arguments: argparse.Namespace) -> None:
    """Prints the figures."""
    on, off = (sorted(sum(turn) / len(turn) for turn in turns) for turns in zip(*pairs, strict=True))
    ratios = sorted(sum(with_guards) / sum(without) for with_guards, without in pairs)
    of_steps = [median(with_guards) / median(without) for with_guards, without in pairs]
    shown = {
        "processes": arguments.processes,
        "steps of a turn": arguments.steps,
        "pairs": len(pairs),
        "ms a step, off (median of turns)": round(1000 * median(off), 3),
        "ms a step, on (median of turns)": round(1000 * median(on), 3),
        "on / off, whole turns: median": round(median(ratios), 4),
        "on / off, whole turns: quartiles": [
            round(ratios[len(ratios) // 4], 4),
            round(ratios[-1 - len(ratios) // 4], 4),
        ],
        "on / off, the median step: median": round(median(of_steps), 4),
        "load of the machine (1 min)": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
    }
    print(json.dumps(shown, indent=2), flush=True)


if __name__ == "__main__":
    main()
