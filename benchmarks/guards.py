"""What the guards of a run cost: the same steps with all of them on and with all of them off, in one run, by turns.

    python benchmarks/guards.py                         4 processes of one device each on this machine
    python benchmarks/guards.py --processes 2 --steps 200

On: the gate for signals, the notes of the watchdog and its thread, the search for slow processes, a comparison of
copies every 100 steps, the ledger. Off: the loop alone. One compiled step serves both. Turns alternate, and so does who
goes first in a pair; a figure is the median over pairs, so that what else the machine does falls on both alike.
Beside the time on the clock stand figures that depend less on that: the seconds of processor of all threads of a
process; the time of the guards' own calls in a step, from a loop whose step does nothing; and that of one comparison.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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
    from spmdkit.launch.startup.worker import job_environment
    from spmdkit.launch.supervision.workers import free_port

    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        workers = [
            subprocess.Popen(command, env=os.environ | job_environment(address, arguments.processes, rank, simulate=1))
            for rank in range(arguments.processes)
        ]
        codes = [worker.wait() for worker in workers]
    sys.exit(max(codes))


def measure(arguments: argparse.Namespace) -> None:
    """Runs the turns in one process; process 0 prints the figures."""
    from spmdkit.checkpoints.replicas import ReplicaCheck
    from spmdkit.configs import load_config
    from spmdkit.launch.startup.worker import joins_processes
    from spmdkit.mesh.processes import is_main_process
    from spmdkit.runtime.build_run import build, prepare_devices
    from spmdkit.runtime.guards.guards import Guards

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
    prepare_devices(config.run, config.precision)
    with joins_processes(config.timeouts):
        built = build(config)
        built.step.compile(built.batch)
        folder = Path(arguments.folder)
        guards = Guards(config.guards, config.timeouts, lambda line: None)
        guards.open(ReplicaCheck(built.step.abstract_state()), folder, 0)
        turns = Turns(built, guards, arguments.steps)
        turns.run(on=True), turns.run(on=False)  # connections and caches
        pairs = [turns.pair(on_first=number % 2 == 0) for number in range(arguments.pairs)]
        comparison = turns.comparison()
        if is_main_process():
            report(pairs, turns.calls(), comparison, arguments)


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

    def pair(self, *, on_first: bool) -> tuple["Turn", "Turn"]:
        """One turn on, and one off."""
        if on_first:
            return self.run(on=True), self.run(on=False)
        off = self.run(on=False)
        return self.run(on=True), off

    def run(self, *, on: bool) -> "Turn":
        """Runs a turn."""
        from spmdkit.training.loop import run_steps

        processor = time.process_time()
        times: list[float] = []
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
            times.append(time.perf_counter())
            self.state = run_steps(step, self.state, batches, start=start, log_every=10, **options)
        self.done += self.steps
        steps = [end - begin for begin, end in pairwise(times)]
        return Turn(sum(steps) / len(steps), median(steps), (time.process_time() - processor) / len(steps))

    def comparison(self, number: int = 30) -> float:
        """Seconds of one comparison of copies that is waited for; the median of some."""
        from spmdkit.checkpoints.replicas import ReplicaCheck

        check, times = ReplicaCheck(self.built.step.abstract_state()), []
        for _ in range(number + 1):
            begin = time.perf_counter()
            assert check.differences(check.begin(self.state)) == []
            times.append(time.perf_counter() - begin)
        return median(times[1:])

    def calls(self, number: int = 20_000) -> float:
        """Seconds of the guards' own calls in a step: a loop with them less one without, nothing else in either."""
        guards, times = self.guards, []
        for on in (False, True):
            waited = guards.waited
            step: Any = guards.step(nothing) if on else nothing
            batches = guards.batches(range(number), 0) if on else iter(range(number))
            after = guards.after_step if on else nothing
            begin = time.perf_counter()
            for each in batches:
                step(each, each)
                if on:
                    waited(0.0)
                after(1, None)  # never a step to compare copies after
            times.append((time.perf_counter() - begin) / number)
        return times[1] - times[0]


class Turn(NamedTuple):
    """Seconds of a step in one turn.

    Attributes:
        mean: on the clock, of all steps.
        middle: on the clock, of the median step.
        processor: of processor, all threads of this process.
    """

    mean: float
    middle: float
    processor: float


def nothing(*ignored: Any) -> None:
    """Takes no time."""


@contextmanager
def guarded(guards: Any) -> Iterator[Any]:
    """All threads of the guards, for one turn."""
    from spmdkit.training.stopping.gate import stops_on_signals

    with stops_on_signals() as gate, guards.watchdog.watching():
        yield gate


def report(pairs: list[tuple[Turn, Turn]], calls: float, comparison: float, arguments: argparse.Namespace) -> None:
    """Prints the figures."""
    off = median(off.mean for _, off in pairs)
    ratios = {name: sorted(getattr(on, name) / getattr(off, name) for on, off in pairs) for name in Turn._fields}
    quarter = len(pairs) // 4
    shown: dict[str, Any] = {
        "processes": arguments.processes,
        "steps of a turn": arguments.steps,
        "pairs": len(pairs),
        "ms a step, off": round(1000 * off, 3),
        "ms a step, on": round(1000 * median(on.mean for on, _ in pairs), 3),
        "us a step in the guards' own calls": round(1e6 * calls, 2),
        "ms of a comparison of copies": round(1000 * comparison, 3),
        "calls and comparisons in a step of 20 ms": f"{100 * (calls + comparison / REPLICAS_EVERY) / 0.02:.2f} %",
        "load of the machine (1 min)": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
    }
    for name, found in ratios.items():
        shown[f"on / off, {name}: median, quartiles"] = [
            round(each, 4) for each in (median(found), found[quarter], found[-1 - quarter])
        ]
    print(json.dumps(shown, indent=2), flush=True)


if __name__ == "__main__":
    main()
