"""`spmdkit launch`: trains in several processes."""

import argparse

from .command import Command, add_config, add_fresh


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `launch`."""
    add_config(parser)
    add_fresh(parser)
    from ..places import PLACES

    where = "; ".join(f"{listed.form}, {listed.text}" for listed in PLACES.values())
    parser.add_argument("--on", metavar="PLACE", help=f"where, which has to be said: {where}")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="K",
        help="start a run that died again, at most K times in a row without a newer checkpoint (0; slurm: 3), on "
        "kubernetes K times in all (6)",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="slurm: wait for the end of the job, and give its exit code; local, ssh and mpi always do",
    )


def launch(arguments: argparse.Namespace) -> int:
    """Trains in several processes."""
    from ...configs.run_folders import of_run_folder
    from ...mesh.errors import UserError
    from ..places import Run, find_place
    from ..streams import outlive_output

    outlive_output()
    restarts = arguments.restarts
    if restarts < 0:
        raise UserError(f"--restarts {restarts}: give 0 or more restarts without a newer checkpoint.")
    place, target = find_place(arguments.on)
    config, overrides = of_run_folder(arguments.config, arguments.overrides)
    run = Run(str(config), tuple(overrides), arguments.fresh, restarts, arguments.wait)
    if arguments.dry_run:
        print(place.describe(run, target))
        return 0
    return place.launch(run, target)


COMMAND = Command(
    "launch",
    "train in several processes, stopped together when one fails",
    "spmdkit launch my.yaml --on local:2x4",
    """
Starts processes that train together over real collectives, and gives the losses of one process with as many devices.
Lines are printed after their rank and kept in run.dir/logs. When a process fails, the others are stopped, and what
it said at its end is printed last, before one line about all of them.

  spmdkit launch quickstart --on local:2x4       2 processes here, 4 simulated devices each
  spmdkit launch my.yaml --on local:2x4 --restarts 3   a run that died goes on by itself
  spmdkit launch my.yaml --on local:2x4 --dry-run      the command lines of the processes, and nothing else
  spmdkit launch my.yaml --on ssh:hosts.yaml     the hosts that a file names, over SSH
  spmdkit launch my.yaml --on slurm:gpu          a job of the partition gpu, of the sizes in the config's section launch
  spmdkit launch my.yaml --on mpi:hosts          mpirun on the hosts of that file
  spmdkit launch my.yaml --on kubernetes         pods of a JobSet, of the sizes in that section
""",
    add_launch,
    launch,
    is_run=True,
)
