"""Runs spmdkit, and dies as by kill -9 at a chosen moment.

`die.py spmdkit.training.metrics:MetricsLog.write 3 train tiny.yaml` dies before the third call of a function;
`die.py event:os.rename:removed- 1 train tiny.yaml` before the first renaming of a file whose name holds that text
(any event that the interpreter audits will do).
"""

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import count
from typing import Any


def countdown(number: int) -> Callable[[], None]:
    """Returns a function whose `number`-th call kills this process."""
    calls = count(1)

    def call() -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return call


def die_at_event(event: str, text: str, tick: Callable[[], None]) -> None:
    """Counts events such as os.rename whose arguments hold a text."""
    sys.addaudithook(lambda name, arguments: tick() if name == event and text in str(arguments) else None)


def die_at_call(module: str, qualified_name: str, tick: Callable[[], None]) -> None:
    """Counts calls of a function or method."""
    *parents, name = qualified_name.split(".")
    owner: Any = import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        tick()
        return original(*arguments, **options)

    setattr(owner, name, counted)


if __name__ == "__main__":
    moment, number, *arguments = sys.argv[1:]
    from spmdkit.launch.cli import main

    if moment.startswith("event:"):
        die_at_event(*moment.split(":")[1:], countdown(int(number)))
    else:
        die_at_call(*moment.split(":"), countdown(int(number)))
    sys.exit(main(arguments))
