"""`spmdkit sweep`: trains a config once for each combination of values."""

import argparse

from .command import Command, add_config, add_fresh, add_json


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sweep`."""
    add_config(parser)
    add_fresh(parser)
    parser.add_argument("--dry-run", action="store_true", help="list the runs with their memory and collectives")
    parser.add_argument(
        "--zip", action="store_true", help="the first values of all keys together, then the second ones, and so on"
    )
    parser.add_argument(
        "--skip-invalid", action="store_true", help="leave out combinations that are a mistake (exit code 2)"
    )
    parser.add_argument("--on", metavar="local:PxD", help="train each run in P processes that simulate D devices each")
    add_json(parser)


def sweep(arguments: argparse.Namespace) -> int:
    """Trains every combination."""
    from ...mesh.errors import UserError
    from ...training.worker import processes_in_job
    from ..local import LocalTarget
    from ..places import find_place
    from ..streams import outlive_output
    from ..sweeping.planning import Asked
    from ..sweeping.sweep import sweep as run

    outlive_output()
    if processes_in_job() > 1:
        raise UserError("spmdkit sweep starts the processes of its runs itself: start it once, not in every process.")
    on = find_place(arguments.on)[1] if arguments.on else None
    if on is not None and not isinstance(on, LocalTarget):
        raise UserError(f"--on {arguments.on}: the runs of a sweep are trained on this machine. Give local:PxD.")
    asked = Asked(arguments.config, arguments.overrides, arguments.zip, arguments.skip_invalid, arguments.fresh, on)
    return run(asked, dry_run=arguments.dry_run, as_json=arguments.json)


COMMAND = Command(
    "sweep",
    "train once for each combination of values, and compare the runs",
    "spmdkit sweep my.yaml strategy=data,fsdp",
    """
Trains a config once for each combination of values: of a key, those that commas part. All combinations are checked
before the first one trains. Each run has a process and a folder of its own, run.dir/KEY=VALUE; the same command again
goes on where it was stopped, and trains nothing twice. A run that fails holds up no other. At the end come a table and
a page that compares the runs, run.dir/sweep.html.

  spmdkit sweep quickstart strategy=data,fsdp                   two runs; a strategy alone has all devices
  spmdkit sweep quickstart 'strategy=fsdp,{data: 2, tensor: 4}'       commas inside brackets and quotes part nothing
  spmdkit sweep my.yaml optimizer.learning_rate=1e-3,3e-4 run.seed=0,1          four: every combination
  spmdkit sweep my.yaml train.global_batch=64,128 optimizer.learning_rate=1e-3,2e-3 --zip          two
  spmdkit sweep my.yaml strategy=data,fsdp --dry-run            what each would hold and send; nothing is trained

Ends with 0 where all have finished, 2 where a combination is a mistake and nothing was trained, 75 where a signal
stopped it; else, of the exit codes of its runs and of the checks before, with the first of 75, 1, 3, 2: a folder that
is in use (75) and an unforeseen error (1) are no mistakes, and --skip-invalid hides neither.
""",
    add_sweep,
    sweep,
    is_run=True,
)
