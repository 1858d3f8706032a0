"""`spmdkit doctor`: what a run would find here, and what is wrong with it."""

import argparse

from .command import CONFIG, Command, add_overrides


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `doctor`."""
    parser.add_argument("config", metavar="CONFIG", nargs="?", help=CONFIG)
    add_overrides(parser, "values laid over those of the file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for the other processes of a run of several (60)",
    )


def doctor(arguments: argparse.Namespace) -> int:
    """Prints what is found and what is wrong."""
    from ...mesh.errors import UserError
    from ..diagnosis.doctor import doctor as run

    if not 0 < arguments.wait < 86400:
        raise UserError(f"--wait {arguments.wait:g}: give more than 0 seconds, and less than a day.")
    return run(arguments.config, arguments.overrides, as_json=arguments.json, seconds=arguments.wait)


COMMAND = Command(
    "doctor",
    "show what a run would find here, from which variable, and what is wrong",
    "spmdkit doctor my.yaml",
    """
Looks at all that a run needs before it starts: its job (coordinator, rank, count, by which variables), versions,
devices, GPUs, cores, memory, limits, the host's name, the coordinator's port, the file system of run.dir. Exit code 0:
nothing is wrong; 2: something is, with its fix. In a run of several processes, start it in all of them, as the run
itself: they meet, compare clocks, versions and run.dir, and process 0 prints for all.

  spmdkit doctor                                 this host
  spmdkit doctor my.yaml                         with the devices and the run.dir of a config
  srun spmdkit doctor my.yaml                    all tasks of an allocation together
  spmdkit doctor my.yaml --json                  for a program to read
""",
    add_doctor,
    doctor,
)
