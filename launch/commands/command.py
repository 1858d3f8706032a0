"""What a command of the command line is, and the arguments that several have.

What a command needs is imported when it runs, so that help is instant.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

CONFIG_HELP = """
CONFIG is a YAML file, or the name of a preset that comes with spmdkit (quickstart). key=value arguments lay single
values over it; the value is YAML:

  train.steps=20  strategy.fsdp=2  'strategy={fsdp: 4, data: 2}'  'data.files=["corpus/**/*.txt"]'
"""


class Command(NamedTuple):
    """One subcommand.

    Attributes:
        name: What is typed.
        summary: One line for the list of commands.
        example: One command line to try it with.
        text: What it does and what for, with examples.
        add_arguments: Adds its arguments to its parser.
        run: Does it; returns the exit code.
        help: What stands at the end of its help, before the exit codes.
        parts: Commands that its first word chooses among; their names begin with its own.
    """

    name: str
    summary: str
    example: str
    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    help: str = CONFIG_HELP
    parts: "tuple[Command, ...]" = ()


class Print(argparse.Action):
    """Prints a text and exits. The text is made when it is asked for: that may take a second."""

    def __init__(self, option_strings: list[str], dest: str, text: Callable[[], str], **options: object) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)  # pyright: ignore[reportArgumentType]
        self.text = text

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> None:
        """Called by argparse where the option is given."""
        print(self.text(), end="")
        parser.exit()


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of every command that reads a config."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file or the name of a preset")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="values laid over those of the file"
    )


def add_fresh(parser: argparse.ArgumentParser) -> None:
    """Adds --fresh."""
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start anew: what run.dir holds of a run, but its logs, is moved to run.dir.old-1 (-2, ...)",
    )
