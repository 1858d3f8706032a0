"""`spmdkit completion`: a shell script that completes commands, options and files."""

import argparse

from .command import Command

SHELLS = ("bash", "zsh")
FILES = ("CONFIG", "RUN", "FILE")
"""Arguments that are completed with file names."""


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `completion`."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def completion(arguments: argparse.Namespace) -> int:
    """Prints a script that completes commands in bash or zsh.

    Load it when the shell starts:

      echo 'eval "$(spmdkit completion bash)"' >> ~/.bashrc
      spmdkit completion zsh > ~/.zfunc/_spmdkit                a directory of $fpath, before compinit
    """
    import shtab

    parser = argparse.ArgumentParser(prog="spmdkit")
    choices = parser.add_subparsers()
    for command in arguments.commands:
        added = choices.add_parser(command.name, help=command.summary)
        command.add_arguments(added)
        for action in added._actions:
            if action.metavar in FILES and not action.choices:
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    print(shtab.complete(parser, shell=arguments.shell))
    return 0


COMMAND = Command("completion", "spmdkit completion bash", completion, add_completion, help="")
