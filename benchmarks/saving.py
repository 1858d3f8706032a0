"""What saving costs the training loop: a state of 100 MB, one save every 20 steps, with and without, in one run.

    python benchmarks/saving.py [--rounds 7] [--every 20] [--rows 8] [--length 64] [--folder DIR] [--json FILE]

A round is 20 steps of a real training loop (`run_steps`) that begin with a save, and 20 that do not, in turn and in
both orders, so that what else the machine does meets both alike. The writing goes on in the background of the steps
that follow, and is over before the round without saves begins. Printed, as medians over rounds:

    ratio            time of steps with a save over time of as many without
    blocks           how long the loop stands still for a save: the devices drain, the state is found finite,
                     `Checkpoints.save` returns
    shares           what the steps behind it take longer: the writing takes cores that simulated devices compute on,
                     which those of an accelerator do not

and what a save alone takes on an idle machine, in its parts: checksums, copies to the host, writing; wall and processor
time, so that what would be hidden by free cores can be told from what would not.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from spmdkit.mesh.devices import simulate

simulate(8)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from spmdkit.checkpoints.checksums import checksums  # noqa: E402
from spmdkit.checkpoints.directory import size_on_disk  # noqa: E402
from spmdkit.checkpoints.manager import Checkpoints  # noqa: E402
from spmdkit.models.transformer import TransformerConfig, transformer  # noqa: E402
from spmdkit.parallel import FSDPConfig, build_step, lay_out  # noqa: E402
from spmdkit.training.loop import run_steps  # noqa: E402

SIZES = {"vocabulary": 256, "layers": 2, "width": 512, "heads": 8, "mlp_width": 2048}


class Clock:
    """Wall and processor seconds since it was made."""

    def __init__(self):
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def seconds(self):
        return np.array([time.perf_counter() - self.wall, time.process_time() - self.processor])


class Saving:
    """A training under way, and its checkpoints."""

    def __init__(self, folder, rows, length):
        model = transformer(TransformerConfig(length=length, **SIZES))
        layouts = lay_out(model, {"fsdp": FSDPConfig(size=8)})
        self.step = build_step(model, optax.adamw(1e-4), layouts, clip_norm=1.0)
        tokens = np.random.default_rng(0).integers(0, 256, (rows, length + 1)).astype(np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((rows, length), np.float32)}
        batch["example"] = np.arange(rows, dtype=np.int32)
        self.batch = jax.device_put(batch, layouts.batch_sharding())
        self.state = self.step.init(0)
        self.done = 0
        self.folder = folder
        self.checkpoints = Checkpoints(folder, keep=1, abstract_state=self.step.abstract_state())

    @property
    def num_bytes(self):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def train(self, steps, *, saves):
        """Seconds of some steps, and of the part that the loop stood still for a save after the first of them."""
        first, stood = self.done + 1, []

        def save(number, state):
            self.checkpoints.save(number, state)
            stood.append(clock_of_pause.seconds())

        def begin(number):  # the pause begins when the loop asks for it: it then waits for the devices
            nonlocal clock_of_pause
            if saves and number == first:
                clock_of_pause = Clock()
                return True
            return False

        clock_of_pause = clock = Clock()
        batches = (self.batch for _ in range(steps))
        self.state = run_steps(
            self.step, self.state, batches, start=self.done, log_every=steps, pause_at=begin, after_pause=save
        )
        jax.block_until_ready(self.state)
        self.done += steps
        seconds = clock.seconds()
        self.checkpoints.wait()
        return seconds, (stood[0] if stood else np.zeros(2))

    def drain(self):
        """Seconds from the start of one step to its end: of the pause, what the loop would have waited for anyway."""
        clock = Clock()
        self.state, _ = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        self.done += 1
        return clock.seconds()

    def alone(self):
        """A save on a machine that does nothing else: wall and processor seconds of its parts."""
        parts = {}
        stored = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(self.state))}
        jax.block_until_ready(checksums(stored))
        clock = Clock()
        jax.block_until_ready(checksums(stored))
        parts["checksums"] = clock.seconds()
        clock = Clock()
        for leaf in stored.values():
            for shard in leaf.addressable_shards:
                np.array(shard.data)
        parts["copies to the host"] = clock.seconds()
        clock = Clock()
        self.checkpoints.save(self.done, self.state)
        parts["Checkpoints.save returns after"] = clock.seconds()
        self.checkpoints.wait()
        parts["written after"] = clock.seconds()
        return parts


def measure(rounds, every, rows, length, folder):
    """All figures, as numbers."""
    saving = Saving(folder, rows, length)
    saving.train(every, saves=True)  # compiles
    times = {"with": [], "without": [], "stood": [], "step": [], "alone": []}
    for number in range(rounds):
        for saves in (True, False) if number % 2 else (False, True):
            seconds, stood = saving.train(every, saves=saves)
            times["with" if saves else "without"].append(seconds)
            if saves:
                times["stood"].append(stood)
        times["step"].append(saving.drain())
        times["alone"].append(saving.alone())
    saving.checkpoints.close()
    with_saves, without = np.array(times["with"]), np.array(times["without"])
    step = np.median(without[:, 0]) / every
    return {
        "load": os.getloadavg(),
        "state_bytes": saving.num_bytes,
        "bytes_on_disk": size_on_disk(folder),
        "step_seconds": step,
        "ratio": np.median(with_saves / without, axis=0).tolist(),
        "ratios": (with_saves / without)[:, 0].tolist(),
        "more": float(np.median(with_saves - without, axis=0)[0]),
        "stood": float(np.median(times["stood"], axis=0)[0]),
        "drain": float(np.median(times["step"], axis=0)[0]),
        "alone": {
            name: np.median([each[name] for each in times["alone"]], axis=0).tolist() for name in times["alone"][0]
        },
    }


def show(found, every):
    """Prints the figures."""
    step, more, stood, drain = (1e3 * found[name] for name in ("step_seconds", "more", "stood", "drain"))
    blocks = max(0.0, stood - drain)
    print(f"state {found['state_bytes'] / 1e6:.0f} MB, {found['bytes_on_disk'] / 1e6:.0f} MB on disk", end="; ")
    print(f"load {found['load'][0]:.1f}; a step takes {step:.0f} ms")
    print(f"{every} steps with a save take {found['ratio'][0]:.3f} x the time of {every} without", end=", ")
    print(f"{found['ratio'][1]:.3f} x the processor time")
    print(f"    rounds     {', '.join(f'{ratio:.3f}' for ratio in sorted(found['ratios']))}")
    print(f"a save costs the loop {more:.0f} ms, {100 * more / step / every:.1f} % of a step on average:")
    print(
        f"    blocks     {blocks:6.0f} ms: the loop stands still for {stood:.0f} ms, of which a step takes {drain:.0f}"
    )
    print(f"    shares     {more - blocks:6.0f} ms: cores that the writing takes from the simulated devices")
    print("a save alone, on a machine that does nothing else:")
    for name, (wall, processor) in found["alone"].items():
        print(f"    {name:<31} {1e3 * wall:6.0f} ms, {1e3 * processor:6.0f} ms of processors")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--every", type=int, default=20, help="steps between two saves")
    parser.add_argument("--rows", type=int, default=8, help="of a batch: how long a step takes")
    parser.add_argument("--length", type=int, default=64, help="positions of a row, likewise")
    parser.add_argument("--folder", help="where to write; by default a temporary folder, which is removed")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="spmdkit-saving-")).absolute()
    try:
        found = measure(arguments.rounds, arguments.every, arguments.rows, arguments.length, folder / "checkpoints")
    finally:
        if not arguments.folder:
            shutil.rmtree(folder)
    show(found, arguments.every)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
