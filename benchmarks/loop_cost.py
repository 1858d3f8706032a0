"""What the training loop adds to a step on the host, beyond calling the bare compiled step.

    python benchmarks/loop_cost.py [--rounds 9] [--steps 300] [--devices 1]

A tiny classifier, whose step takes a fraction of a millisecond, is trained in rounds of so many steps, in turn:

    bare         the compiled program alone, called back to back, at most two steps ahead of the devices
    run_steps    `spmdkit.run_steps` around the same step, metrics logged every 10 steps and thrown away
    default      what `spmdkit train` puts around it: metrics.jsonl, the display (into a file), the watchdog, the ledger
                 of times, the gate that signals close, the section `callbacks` empty
    callbacks    the same with csv, early_stopping, best_checkpoint, stop_file and time_limit
    all          these, and profile (its window over), tensorboard and reduce_on_plateau

No evaluation and no save falls into a round. Printed for each, in milliseconds a step: the time on the clock, and the
processor time of the thread that trains, which what else the machine does touches less; each as the median over rounds,
with what it is more than bare as the median over the differences within a round.

Measured with --rounds 40 --steps 100 (2 cores at a load of 7, CPU, JAX 0.10.2, November 2026):

    ms a step       clock     more   thread     more
    bare            0.396   +0.000    0.094   +0.000
    run_steps       0.601   +0.231    0.152   +0.065
    default         0.657   +0.276    0.207   +0.112
    callbacks       0.818   +0.405    0.217   +0.121
    all             0.918   +0.574    0.254   +0.159
"""

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from spmdkit.checkpoints.replicas import ReplicaCheck
from spmdkit.configs import load_config
from spmdkit.mesh.devices import simulate
from spmdkit.runtime.build_run import build, configured_callbacks
from spmdkit.runtime.guards.guards import Guards
from spmdkit.runtime.run_context import Recorder, run_for_callbacks
from spmdkit.training.callbacks.conductor import Conductor
from spmdkit.training.display import Display
from spmdkit.training.loop import run_steps
from spmdkit.training.steps.late_log import RUN_AHEAD
from spmdkit.training.stopping.gate import stops_on_signals

USUAL = ["csv", "early_stopping", "best_checkpoint", "stop_file", {"name": "time_limit", "after": "1d"}]
ALL = [*USUAL, {"name": "profile", "start": 1, "steps": 1}, "tensorboard", "reduce_on_plateau"]
CONFIG = """
run: {{dir: {folder}, log_every: 10}}
model: {{name: mlp, classes: 10, widths: [16]}}
data: {{source: synthetic}}
strategy: {{data: -1}}
train: {{steps: {steps}, global_batch: 8}}
callbacks: {callbacks}
"""


class Contestant:
    """A way to train; keeps its state from round to round."""

    def __init__(self, kind, callbacks, folder, stack, num_steps):
        self.kind, self.folder, self.stack = kind, folder, stack
        folder.mkdir()
        file = folder / "config.yaml"
        file.write_text(CONFIG.format(folder=folder, steps=num_steps, callbacks=callbacks))
        self.built = build(load_config(file))
        self.step = self.built.step
        sample = [self.built.splits.train[row] for row in range(8)]
        rows = {name: [each[name] for each in sample] for name in sample[0]}
        batch = {name: np.stack(values) for name, values in rows.items()}
        known = {name: leaf for name, leaf in self.built.batch.items() if name not in batch}
        batch |= {name: np.ones(leaf.shape, leaf.dtype) for name, leaf in known.items()}
        self.batch = jax.device_put(batch, self.built.layouts.batch_sharding())
        self.compiled = self.step.compile(self.built.batch)
        self.state = self.step.init(0)
        self.done = 0
        if kind == "whole":
            self._open()

    def _open(self):
        built, stack = self.built, self.stack
        console = Console(file=stack.enter_context((self.folder / "printed").open("w")), width=120)
        self.display = stack.enter_context(Display(built.config.train.steps, 0, "", console))
        self.gate = stack.enter_context(stops_on_signals())
        self.guards = Guards(built.config.guards, built.config.timeouts, self.display.message)
        say = self.display.message
        run = run_for_callbacks(built, self.folder, start=0, can_scale=False, say=say, left_out=())
        self.conductor = Conductor(configured_callbacks(built.config), run, self.gate)
        self.recorder = Recorder(built, self.display, run, self.conductor)
        stack.enter_context(self.recorder.open(self.folder, 0))
        stack.callback(self.conductor.close)
        self.guards.open(ReplicaCheck(built.step.abstract_state()), self.folder, 0)
        stack.enter_context(self.guards.watching())
        self.state = self.conductor.begin(self.state)

    def train(self, steps):
        """Milliseconds a step: on the clock, and of a processor in this thread alone."""
        batches = [self.batch] * steps
        begin = np.array([time.perf_counter(), time.thread_time()])
        getattr(self, f"_{self.kind}")(batches)
        self.state.step.block_until_ready()
        self.done += steps
        return (np.array([time.perf_counter(), time.thread_time()]) - begin) / steps * 1e3

    def _bare(self, batches):
        running = []
        for batch in batches:
            self.state, metrics = self.compiled(self.state, batch)
            running.append(metrics)
            if len(running) > RUN_AHEAD:
                running.pop(0).loss.block_until_ready()

    def _loop(self, batches):
        self.state = run_steps(self.step, self.state, batches, start=self.done)

    def _whole(self, batches):
        self.state = run_steps(
            self.guards.step(self.step),
            self.state,
            self.guards.batches(batches, self.done),
            start=self.done,
            on_progress=self.recorder,
            pause_at=self.conductor.pauses_at,
            on_pause=self.conductor.pause,
            after_pause=self.conductor.after_pause,
            may_start=self.conductor.may_start,
            after_step=self.guards.after_step,
            waited=self.guards.waited,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--devices", type=int, default=1)
    given = parser.parse_args()
    simulate(given.devices)
    total = (given.rounds + 1) * given.steps
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ways = {"bare": ("bare", []), "run_steps": ("loop", []), "default": ("whole", [])}
        ways |= {"callbacks": ("whole", USUAL), "all": ("whole", ALL)}
        contestants = {
            name: Contestant(kind, callbacks, Path(folder) / name, stack, total)
            for name, (kind, callbacks) in ways.items()
        }
        rounds = []
        for number in range(given.rounds + 1):  # the first compiles and warms up
            names = list(contestants)[:: 1 if number % 2 else -1]
            found = {name: contestants[name].train(given.steps) for name in names}
            rounds += [found] if number else []
    print(f"{os.cpu_count()} cores, {given.devices} devices, median of {given.rounds} rounds of {given.steps} steps")
    print(f"{'ms a step':<12} {'clock':>8} {'more':>8} {'thread':>8} {'more':>8}")
    for name in contestants:
        own = np.median([each[name] for each in rounds], 0)
        more = np.median([each[name] - each["bare"] for each in rounds], 0)
        print(f"{name:<12} {own[0]:8.3f} {more[0]:+8.3f} {own[1]:8.3f} {more[1]:+8.3f}")


if __name__ == "__main__":
    main()
