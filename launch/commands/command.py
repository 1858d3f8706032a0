"""What a command of the command line is, and the arguments that several have.

What a command needs is imported when it runs, so that help is instant.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

CONFIG_HELP = """
CONFIG is a YAML file, or the name of a preset that comes with spmdkit (quickstart); the folder of a run stands for the
config.yaml in it, with that folder as run.dir. key=value arguments lay single values over it; the value is YAML:

  train.steps=20  strategy.fsdp=2  'strategy={fsdp: 4, data: 2}'  'data.files=["corpus/**/*.txt"]'
"""

CONFIG = "a YAML file, the name of a preset, or the folder of a run"
PLACE = "the folder of a run (run.dir), or that of one of its checkpoints"
OR_CONFIG = "; or a config whose run.dir holds a run"
RUN_HELP = f"""
RUN is {PLACE}:

  runs/one    runs/one/checkpoints/40    runs/one/40
"""
TRAINED_HELP = f"""{RUN_HELP}
or a CONFIG, a YAML file or preset whose run.dir holds a run. key=value arguments lay single values over the config of
the run for this command alone; nothing in the run's folder changes, and it may go on training meanwhile:

  'strategy={{fsdp: 8}}'  run.simulate=0  'data.eval_files=["new/*.txt"]'  train.global_batch=256
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
        is_run: Whether it trains, and so ends with code 75 and a word on signals, from its first moment.
    """

    name: str
    summary: str
    example: str
    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    help: str = CONFIG_HELP
    parts: "tuple[Command, ...]" = ()
    is_run: bool = False


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
    parser.add_argument("config", metavar="CONFIG", help=CONFIG)
    add_overrides(parser, "values laid over those of the file")


def add_fresh(parser: argparse.ArgumentParser) -> None:
    """Adds --fresh."""
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start anew: what run.dir holds of a run, but its logs, is moved to run.dir.old-1 (-2, ...)",
    )


def add_run(parser: argparse.ArgumentParser, name: str = "place", metavar: str = "RUN", also: str = "") -> None:
    """Adds an argument that names a run or a checkpoint."""
    parser.add_argument(name, metavar=metavar, help=f"{PLACE}{also}")


def add_trained(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of every command that loads the model of a run."""
    add_run(parser, also=OR_CONFIG)
    add_overrides(parser)
    add_step(parser, "the newest")
    add_ema(parser)


def add_overrides(parser: argparse.ArgumentParser, text: str = "values laid over those of the run's config") -> None:
    """Adds key=value."""
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=text)


def add_ema(parser: argparse.ArgumentParser) -> None:
    """Adds --ema."""
    parser.add_argument("--ema", action="store_true", help="the averages that the run kept (optimizer.ema)")


def add_step(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Adds --step."""
    parser.add_argument("--step", type=int, metavar="N", help=f"the checkpoint of this step; by default {otherwise}")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
