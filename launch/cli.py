"""The command line: `spmdkit init`, `train`, `launch`, `explain`, `verify`; of a trained run `evaluate`,
`predict`, `generate`, `export`, `report`; and `schedule`, `checkpoint`, `doctor`, `completion`.

Each command is a file of commands/ and one line of COMMANDS.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from ..training.ending.interrupts import ends_on_signals
from .commands import (
    checkpoint,
    completion,
    doctor,
    evaluate,
    explain,
    export,
    generate,
    init,
    launch,
    predict,
    report,
    schedule,
    train,
    verify,
)
from .commands.command import Command, Print
from .plain_warnings import plain_warnings
from .streams import open_closed_streams, restart_in_utf8, tolerant_streams, too_little_memory

TRY_AGAIN = 75
"""As in training/ending/exits.py, which a help text cannot wait for."""

WHAT_IT_IS = """
Distributed training for JAX: write a loss for one device, name the mesh in
YAML, train on N devices.

start here:
  spmdkit train quickstart

commands, an example of each:
{commands}
CONFIG is a YAML file or a preset (spmdkit train --list); any key of it can be
given as key=value. `spmdkit COMMAND --help` says more of a command, `spmdkit
train --help-config` lists every key.
"""

EXIT_CODES = """
exit codes: 0 finished, 1 an unforeseen error, 2 a mistake to correct, 3 diverged or bad data, 75 stopped: try again.
SPMDKIT_TRACEBACK=1 shows the traceback of a mistake as well.
"""


def version_text() -> str:
    """What `--version` prints: what a report of an error has to say."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("spmdkit", "jax", "jaxlib"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join([*found, f"Python {platform.python_version()}"]) + "\n"


COMMANDS = (
    init.COMMAND,
    train.COMMAND,
    launch.COMMAND,
    explain.COMMAND,
    verify.COMMAND,
    evaluate.COMMAND,
    predict.COMMAND,
    generate.COMMAND,
    export.COMMAND,
    report.COMMAND,
    schedule.COMMAND,
    checkpoint.COMMAND,
    doctor.COMMAND,
    completion.COMMAND,
)


class Parser(argparse.ArgumentParser):
    """Argparse's parser; arguments that it quotes cannot change the terminal."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse where an argument is wrong."""
        from ..mesh.text import printable

        super().error(printable(message))

    def print_help(self, file: Any = None) -> None:
        """Prints the help text; argparse itself ignores a stream that cannot be written to."""
        (file or sys.stdout).write(self.format_help())


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser of the first word: which command."""
    shown = "".join(f"  {command.example}\n      {command.summary}\n" for command in COMMANDS)
    parser = Parser(
        prog="spmdkit",
        usage="spmdkit COMMAND [CONFIG] [key=value ...] [options]",
        description=WHAT_IT_IS.format(commands=shown),
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=Print, text=version_text, help="print the versions, and exit")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def find_command(name: str, parser: argparse.ArgumentParser) -> Command:
    """Returns the command of a name; where there is none, exits with what is near, or how to train a config."""
    commands = {command.name: command for command in COMMANDS}
    if name not in commands:
        from ..configs.presets import preset_names
        from ..mesh.near_miss import nearest

        near = nearest(name, commands)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(commands)}"
        if name.endswith((".yaml", ".yml")) or name in preset_names():
            hint = f"to train it: spmdkit train {name}"
        parser.error(f"{name!r} is not a command; {hint}")
    return commands[name]


def find_part(command: Command, words: Sequence[str]) -> tuple[Command, Sequence[str]]:
    """Goes on to the part of a command that its first word names, where it has parts; exits where there is none."""
    if not command.parts:
        return command, words
    parts = {part.name.removeprefix(f"{command.name} "): part for part in command.parts}
    if words and words[0] in parts:
        return parts[words[0]], words[1:]
    parser = make_command_parser(command)
    if not words or words[0] in ("-h", "--help", "help"):
        parser.print_help()
        parser.exit(0)
    from ..mesh.near_miss import nearest

    near = nearest(words[0], parts)
    hint = f"did you mean {near[0]}?" if near else f"its parts are {', '.join(parts)}"
    parser.error(f"{words[0]!r} is no part of spmdkit {command.name}; {hint}")


def make_command_parser(command: Command) -> argparse.ArgumentParser:
    """Builds the parser of the arguments of one command."""
    parser = Parser(
        prog=f"spmdkit {command.name}",
        description=command.text,
        epilog=command.help + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return parser


def parse_arguments(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments of a command; exits with code 2, and with what to write instead, where they are wrong."""
    part, words = find_part(command, words)
    parser = make_command_parser(part)
    arguments, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        from .options import explain_unknown

        options = re.findall(r"--[a-z-]+", parser.format_usage())
        parser.error(explain_unknown(unknown, words, options=options, reads_config="overrides" in arguments))
    arguments.part, arguments.commands = part, COMMANDS
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: Arguments without the program's name; None = the process's own.

    Returns:
        The exit code: see training/ending/exits.py.
    """
    if argv is None:
        restart_in_utf8()
        open_closed_streams()
    with tolerant_streams(), plain_warnings(), ExitStack() as stack:
        try:
            try:
                code = _run(argv, stack)
            except SystemExit:  # argparse has printed a help text, or what is wrong
                sys.stdout.flush()
                raise
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt) as error:
            from ..training.ending.exits import report_error

            return report_error(error)


def _run(argv: Sequence[str] | None, stack: ExitStack) -> int:
    """Reads the arguments, which may import much, and runs their command.

    Args:
        argv: As of `main`.
        stack: Closed when the outcome has been reported; until then a run handles signals.
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
    problem = too_little_memory()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return TRY_AGAIN
    return command.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
