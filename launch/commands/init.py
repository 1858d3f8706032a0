"""`spmdkit init`: a config to begin with."""

import argparse

from .command import Command


def add_init(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `init`."""
    parser.add_argument("preset", metavar="NAME", nargs="?", help="a preset; by default a small config with comments")


def init(arguments: argparse.Namespace) -> int:
    """Prints a config to begin with."""
    from ...configs.load import find_preset
    from ...configs.presets import STARTER, preset_text

    print(preset_text(find_preset(arguments.preset)) if arguments.preset else STARTER, end="")
    return 0


COMMAND = Command(
    "init",
    "print a config to begin with",
    "spmdkit init > my.yaml",
    """
Prints a small config with comments, or a preset. Write it to a file, change it, train it.

  spmdkit init > my.yaml                         strategy, model, data, optimizer: a line on each
  spmdkit init fsdp > my.yaml                    a preset; `spmdkit train --list` names them
  spmdkit train my.yaml                          trains it
""",
    add_init,
    init,
    "",
)
