"""The command line. Each command is a `Command` in commands/ and an entry of COMMANDS."""

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from ..training.stopping.interrupts import ends_on_signals
from .commands import checkpoint_commands, completion, model_commands, report, run_commands, schedule
from .commands.command import Command, Print
from .console import check_address_space, open_console
from .supervision.lifetime import bind_to_launcher

DESCRIPTION = """
Distributed training for JAX: write a loss for one device, describe the mesh in
YAML, train on N devices.

start here:
  spmdkit train quickstart

commands, with an example of each:
{commands}
CONFIG is a YAML file or a preset (spmdkit train --list). Set any of its keys
with key=value. `spmdkit COMMAND --help` describes a command, `spmdkit train
--help-config` lists every key.
"""
EXIT_CODES = """
exit codes: 0 finished, 1 unexpected error, 2 mistake in the config or arguments, 3 diverged or bad data, 75 stopped:
try again. SPMDKIT_TRACEBACK=1 also prints the traceback of a mistake.
"""
COMMANDS = (
    run_commands.INIT,
    run_commands.SCHEMA,
    run_commands.TRAIN,
    run_commands.LAUNCH,
    run_commands.EXPLAIN,
    run_commands.PLAN,
    run_commands.VERIFY,
    model_commands.EVALUATE,
    model_commands.PREDICT,
    model_commands.GENERATE,
    checkpoint_commands.EXPORT,
    report.COMMAND,
    schedule.COMMAND,
    checkpoint_commands.CHECKPOINT,
    run_commands.DOCTOR,
    completion.COMMAND,
)
NOT_PATHS = ("overrides", "word", "on")
"""Arguments with any text: `key=value`, a prompt, and a launcher such as ssh:hosts.yaml; they are checked later."""


def version_text() -> str:
    """Returns the output of `--version`: the versions that a bug report needs."""
    import platform
    from importlib import import_module
    from importlib.metadata import version

    own = import_module(__name__.partition(".")[0]).__version__  # a clone need not be installed
    return f"spmdkit {own}, jax {version('jax')}, jaxlib {version('jaxlib')}, Python {platform.python_version()}\n"


class Parser(argparse.ArgumentParser):
    """argparse's parser, which escapes control characters and reports a standard output that cannot be written."""

    def print_help(self, file: Any = None) -> None:
        """Prints the help text; argparse itself ignores errors."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Prints the usage and a message, and exits with code 2."""
        from ..mesh.errors import printable

        super().error(printable(message))


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the first argument, the command."""
    examples = "".join(f"  {command.example}\n      {command.summary}\n" for command in COMMANDS)
    parser = Parser(
        prog="spmdkit",
        usage="spmdkit COMMAND [CONFIG] [key=value ...] [options]",
        description=DESCRIPTION.format(commands=examples),
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "launch.cli:version_text"
    parser.add_argument("--version", action=Print, nargs=0, const=text, help="print the versions and exit")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def find_command(name: str, parser: argparse.ArgumentParser) -> Command:
    """Returns a command by name; exits with a suggestion if it is unknown."""
    commands = {command.name: command for command in COMMANDS}
    if name not in commands:
        from ..configs.config_sources import preset_names
        from ..mesh.errors import nearest

        near = nearest(name, commands)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(commands)}"
        if name.endswith((".yaml", ".yml")) or name in preset_names():
            hint = f"to train it: spmdkit train {name}"
        parser.error(f"unknown command {name!r}; {hint}")
    return commands[name]


def make_command_parser(command: Command) -> argparse.ArgumentParser:
    """Returns the parser of the arguments of a command."""
    parser = Parser(
        prog=f"spmdkit {command.name}",
        description=command.description,
        epilog=command.help + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return parser


def parse_arguments(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments of a command; exits with code 2 and a suggestion if they are invalid."""
    parser = make_command_parser(command)
    arguments, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        from .commands.suggestions import explain_unknown

        options = re.findall(r"--[a-z-]+", parser.format_usage())
        parser.error(explain_unknown(unknown, options, reads_config="overrides" in arguments))
    for name, value in vars(arguments).items():
        if name not in NOT_PATHS:
            _reject_urls(name, value, parser)
    arguments.commands = COMMANDS
    return arguments


def _reject_urls(name: str, value: Any, parser: argparse.ArgumentParser) -> None:
    """Exits with code 2 if an argument, or one of several, is a URL."""
    from ..mesh.errors import UserError
    from ..mesh.files import check_local

    for item in value if isinstance(value, list) else [value]:
        try:
            check_local(str(item), f"argument {name}:")
        except UserError as error:
            parser.error(str(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The arguments without the program's name; None = those of the process.

    Returns:
        The exit code; see mesh/exit_codes.py.
    """
    bind_to_launcher()
    with open_console(), ExitStack() as stack:
        try:
            try:
                return _run(argv, stack)
            finally:
                print(end="", flush=True)  # an output that cannot be written is an error
        except (Exception, KeyboardInterrupt) as error:
            from ..mesh.known_causes import report_error

            return report_error(error)


def _run(argv: Sequence[str] | None, stack: ExitStack) -> int:
    """Parses the arguments and runs their command.

    Args:
        argv: The arguments of `main`.
        stack: Closed after the result was reported; until then, a run handles signals.
    """
    parser = make_parser()
    first = parser.parse_args(argv)
    if first.command in (None, "help"):
        parser.print_help()
        return 0
    command = find_command(first.command, parser)
    if command.is_run:
        stack.enter_context(ends_on_signals(until_the_end=argv is None))
    arguments = parse_arguments(command, first.rest)
    arguments.is_own_process = argv is None
    check_address_space()
    try:
        return command.run(arguments)
    except SystemExit as error:
        if error.code:
            raise
        from ..parallel.model.user_errors import explain_exit

        raise explain_exit(error, command.name) from error
