"""Runs spmdkit in a process that sends itself a signal when a function is called.

`signal_at.py spmdkit.checkpoints.manager:Checkpoints.restore SIGTERM train tiny.yaml`
"""

import os
import signal
import sys
from functools import reduce
from importlib import import_module


def signal_at(place: str, name: str) -> None:
    """Wraps a function: its first call begins with a signal."""
    module, _, path = place.partition(":")
    *above, last = path.split(".")
    holder = reduce(getattr, above, import_module(module))
    function, calls = getattr(holder, last), []

    def wrapped(*arguments, **options):
        if not calls:
            calls.append(place)
            os.kill(os.getpid(), getattr(signal, name))
        return function(*arguments, **options)

    setattr(holder, last, wrapped)


if __name__ == "__main__":
    from spmdkit.launch.cli import main

    signal_at(*sys.argv[1:3])
    sys.exit(main(sys.argv[3:]))
