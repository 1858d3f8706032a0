"""Compiled memory of a pipeline's step as microbatches of a fixed size become more: 1f1b against gpipe, on 4 stages.

    python benchmarks/pipeline_memory.py [--microbatches 8 16 32 64] [--schedules 1f1b gpipe] [--small] [--table]

Nothing runs: the steps are compiled from shapes alone, and the figures are XLA's. `other` is what a device is given:
its part of the state and the batch, which has more rows with every microbatch. docs/pipeline-schedules.md shows it.
"""

import argparse
from dataclasses import replace

from spmdkit.mesh.devices import simulate

simulate(8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from cases import DIVISIBLE, SMALL  # noqa: E402
from spmdkit.models.transformer import transformer  # noqa: E402
from spmdkit.parallel import build_step, lay_out  # noqa: E402
from spmdkit.parallel.pipeline import PipelineConfig  # noqa: E402
from spmdkit.parallel.schedule.builders import make_schedule  # noqa: E402
from spmdkit.parallel.schedule.timing import measure as timing  # noqa: E402

STAGES, DATA, ROWS_OF_MICROBATCH = 4, 2, 2
KIB = 1024


def measure(config, schedule, microbatches):
    """KiB of one device: temporaries, and what else it holds."""
    pipe = PipelineConfig(size=STAGES, schedule=schedule, microbatches=microbatches)
    layouts = lay_out(transformer(config), {"pipe": pipe, "data": DATA})
    step = build_step(transformer(config), optax.adamw(1e-3), layouts)
    shape = (microbatches * ROWS_OF_MICROBATCH * DATA, config.length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}
    batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    sizes = step.compile(batch).memory_analysis()
    other = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.temp_size_in_bytes / KIB, other / KIB


def print_table(config, schedules, counts):
    """Prints the temporaries in MiB, with the share of the time in which stages of 1f1b and gpipe are idle."""
    print(f"| M | idle share of `1f1b` and `gpipe` | {' | '.join(f'`{schedule}`' for schedule in schedules)} |")
    print("|---|---|" + "---|" * len(schedules), flush=True)
    for microbatches in counts:
        idle = timing(make_schedule("1f1b", STAGES, microbatches)).bubble
        sizes = [measure(config, schedule, microbatches)[0] / KIB for schedule in schedules]
        print(f"| {microbatches} | {idle:.1%} | {' | '.join(f'{size:.1f}' for size in sizes)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1", "gpipe"])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--table", action="store_true", help="temporaries in MiB, as the table of docs/")
    arguments = parser.parse_args()
    config = replace(DIVISIBLE, **SMALL) if arguments.small else DIVISIBLE
    if arguments.table:
        return print_table(config, arguments.schedules, arguments.microbatches)
    print(
        f"JAX {jax.__version__}, {STAGES} stages x data {DATA}, microbatches of {ROWS_OF_MICROBATCH} rows, KiB a device"
    )
    print("".join(f"{title:>14}" for title in ("microbatches", "other", *arguments.schedules)), flush=True)
    for microbatches in arguments.microbatches:
        measured = [measure(config, schedule, microbatches) for schedule in arguments.schedules]
        cells = (microbatches, measured[0][1], *(temporary for temporary, _ in measured))
        print("".join(f"{cell:14,.0f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
