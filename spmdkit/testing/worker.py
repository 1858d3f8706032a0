"""`python -m spmdkit.testing.worker train my.yaml`: the command line of spmdkit, with the faults of SPMDKIT_FAULT.

`launch ... --on local:PxD` starts its processes in the same way, and notes when they start and how they end.
"""

# pyright: reportMissingImports=false

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .faults import JOURNAL, VARIABLE, read_faults
from .injector import Injector
from .journal import Journal
from .moments import install, replace

MODULE = "spmdkit.testing.worker"


def main(words: Sequence[str]) -> int:
    """Runs a command under faults.

    Args:
        words: The arguments of `spmdkit`.

    Returns:
        Its exit code.
    """
    from ..launch.cli import main as spmdkit

    path = os.environ.get(JOURNAL)
    journal = Journal(Path(path) if path else None)
    if words[:1] == ["launch"]:
        replace("spmdkit.launch.local:worker_command", _under_test)
        replace("spmdkit.launch.supervision.attempts:run_processes", lambda original: _noted(original, journal))
    else:
        rank = int(os.environ.get("SPMDKIT_PROCESS_ID") or 0)
        install(Injector(read_faults(os.environ.get(VARIABLE, "")), rank, journal))
    return spmdkit(words)


def _under_test(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The launcher's command of a process, run by this module in place of spmdkit."""

    def worker_command(*arguments: Any, **options: Any) -> list[str]:
        return [MODULE if word == "spmdkit" else word for word in original(*arguments, **options)]

    return worker_command


def _noted(original: Callable[..., Any], journal: Journal) -> Callable[..., Any]:
    def run_processes(*arguments: Any, **options: Any) -> Any:
        journal.note("attempt")
        outcome = original(*arguments, **options)
        cause = outcome.cause
        exits = [[end.rank, end.code, end.stopped] for end in outcome.exits]
        journal.note("ended", exits=exits, cause=list(cause) if cause else None, code=outcome.exit_code)
        return outcome

    return run_processes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
