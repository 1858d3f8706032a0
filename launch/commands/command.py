"""The structure of a command, and the arguments that several commands share."""

import argparse
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ...runtime.loading.load_run import LoadedRun

PACKAGE = __name__.partition(".")[0]
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
    """Prints a text and exits. `const` names the function that returns it, which is slow to import."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> None:
        """Called by argparse if the option is given."""
        print(resolve_name(f"{PACKAGE}.{self.const}")(), end="")
        parser.exit()


ARGUMENTS: dict[str, dict[str, Any]] = {
    "config": {"metavar": "CONFIG", "help": CONFIG},
    "place": {"metavar": "RUN", "help": f"{PLACE}{OR_CONFIG}"},
    "overrides": {"metavar": "key=value", "nargs": "*", "default": [], "help": "override values of the config"},
    "--fresh": {
        "action": "store_true",
        "help": "start from step 0; the contents of run.dir, except logs, are moved to run.dir.old-1 (-2, ...)",
    },
    "--step": {"type": int, "metavar": "N", "help": "the checkpoint of this step (default: the latest)"},
    "--ema": {"action": "store_true", "help": "use the averaged parameters of the run (optimizer.ema)"},
    "--json": {"action": "store_true", "help": "print one JSON object instead of text"},
}
"""Arguments of several commands -> their options in `add_argument`."""


def add(parser: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Adds arguments of ARGUMENTS to a parser.

    Args:
        parser: The parser of a command.
        names: The arguments, in order.
        changes: Options that this command changes, such as `help`.
    """
    for name in names:
        parser.add_argument(name, **{**ARGUMENTS[name], **changes})


def output_file(text: str) -> Path:
    """Returns the absolute path of a file that a command writes at its end: a `type` of `add_argument`.

    Raises:
        ArgumentTypeError: It cannot be written.
    """
    from ...mesh.errors import UserError
    from ...mesh.files import absolute_path, check_replaceable

    try:
        path = absolute_path(text)
        check_replaceable(path)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if path.is_dir() or not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{path}: must be a file in a writable directory. Give another path.")
    return path


def open_run(arguments: argparse.Namespace) -> "AbstractContextManager[LoadedRun]":
    """Joins the other processes of the command and loads the run that its arguments name, for a `with` block.

    Args:
        arguments: The parsed arguments, with `place`, `overrides`, `step` and `ema`.
    """
    from ...runtime.loading.load_run import loaded
    from ..startup.worker import count_simulated, joins_processes

    options = {"join": joins_processes, "simulate": count_simulated()}
    return loaded(arguments.place, arguments.step, arguments.overrides, ema=arguments.ema, **options)
