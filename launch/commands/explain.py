"""`spmdkit explain`: what a run holds and moves."""

import argparse

from .command import Command, add_config


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `explain`."""
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def explain(arguments: argparse.Namespace) -> int:
    """Prints what a run will hold and move."""
    import json

    from ...configs import load_config
    from ..run.explain import explain as run

    explanation = run(load_config(arguments.config, arguments.overrides))
    print(json.dumps(explanation.to_json(), indent=2) if arguments.json else explanation)
    return 0


COMMAND = Command(
    "explain",
    "show the mesh, layouts, bytes and collectives, without training",
    "spmdkit explain my.yaml",
    """
Lays out and compiles the run of a config and shows the mesh, where each parameter lives, the bytes on each device by
kind, the memory of the compiled step, and its collectives by kind and mesh axis. Nothing is trained.

  spmdkit explain quickstart                     as tables
  spmdkit explain quickstart --json              for a program to read
""",
    add_explain,
    explain,
)
