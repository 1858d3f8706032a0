"""The structure of a command, and the arguments that several commands share."""

import argparse
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...runtime.loading.load_run import LoadedRun

CONFIG_HELP = """
CONFIG is a YAML file or the name of a preset (quickstart). It can also be the directory of a run: then the config.yaml
in it is used, with that directory as run.dir. key=value arguments override single values; the value is YAML:

  train.steps=20  strategy.fsdp=2  'strategy={fsdp: 4, data: 2}'  'data.files=["corpus/**/*.txt"]'
"""
CONFIG = "a YAML file, the name of a preset, or the directory of a run"
PLACE = "the directory of a run (run.dir) or of one of its checkpoints"
OR_CONFIG = "; or a config whose run.dir contains a run"
RUN_HELP = f"""
RUN is {PLACE}:

  runs/one    runs/one/checkpoints/40    runs/one/40
"""
TRAINED_HELP = f"""{RUN_HELP}
or a CONFIG, a YAML file or preset whose run.dir contains a run. key=value arguments override values of the run's config
for this command only. The run's directory does not change, and the run may continue to train at the same time:

  'strategy={{fsdp: 8}}'  run.simulate=0  'data.eval_files=["new/*.txt"]'  train.global_batch=256
"""


def use_cpu_only() -> None:
    """Leaves accelerators to other processes: JAX opens only the CPU in this one."""
    import jax

    jax.config.update("jax_platforms", "cpu")


class Command(NamedTuple):
    """One subcommand.

    Attributes:
        name: The name on the command line.
        example: An example command line.
        run: Runs the command; returns the exit code. Its docstring is the description in the help text, and the first
            line of that is the summary in the list of commands.
        add_arguments: Adds the arguments to a parser.
        help: The end of the help text, before the exit codes.
        is_run: If it trains, and therefore ends with code 75 and a message on signals from the beginning.
    """

    name: str
    example: str
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    help: str = CONFIG_HELP
    is_run: bool = False

    @property
    def description(self) -> str:
        """The description with examples."""
        return inspect.getdoc(self.run) or ""

    @property
    def summary(self) -> str:
        """The first line of the description."""
        return self.description.partition("\n")[0]


class Print(argparse.Action):
    """Prints a text and exits. The text is only computed if the option is given, because that may take a second."""

    def __init__(self, option_strings: list[str], dest: str, text: Callable[[], str], **options: object) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)  # pyright: ignore[reportArgumentType]
        self.text = text

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> None:
        """Called by argparse if the option is given."""
        print(self.text(), end="")
        parser.exit()


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of every command that reads a config."""
    parser.add_argument("config", metavar="CONFIG", help=CONFIG)
    add_overrides(parser, "override values of the config")


def add_fresh(parser: argparse.ArgumentParser) -> None:
    """Adds --fresh."""
    text = "start from step 0; the contents of run.dir, except logs, are moved to run.dir.old-1 (-2, ...)"
    parser.add_argument("--fresh", action="store_true", help=text)


def add_run(parser: argparse.ArgumentParser, also: str = "") -> None:
    """Adds the argument RUN."""
    parser.add_argument("place", metavar="RUN", help=f"{PLACE}{also}")


def add_overrides(parser: argparse.ArgumentParser, text: str = "override values of the run's config") -> None:
    """Adds key=value."""
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=text)


def add_step(parser: argparse.ArgumentParser, default: str = "the latest") -> None:
    """Adds --step."""
    parser.add_argument("--step", type=int, metavar="N", help=f"the checkpoint of this step (default: {default})")


def add_step_and_ema(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select the parameters of a run."""
    add_step(parser)
    parser.add_argument("--ema", action="store_true", help="use the averaged parameters of the run (optimizer.ema)")


def add_trained(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of every command that loads the model of a run."""
    add_run(parser, also=OR_CONFIG)
    add_overrides(parser)
    add_step_and_ema(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


@contextmanager
def open_run(arguments: argparse.Namespace, overrides: Sequence[str] | None = None) -> "Iterator[LoadedRun]":
    """Joins the other processes of the command and loads the run that its arguments name.

    Args:
        arguments: The parsed arguments, see `add_trained`.
        overrides: `key=value` arguments in place of those of `arguments`.
    """
    from ...runtime.loading.load_run import loaded
    from ..startup.worker import count_simulated, joins_processes

    changes = arguments.overrides if overrides is None else overrides
    options = {"join": joins_processes, "simulate": count_simulated()}
    with loaded(arguments.place, arguments.step, changes, ema=arguments.ema, **options) as run:
        yield run
