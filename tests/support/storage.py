"""Runs spmdkit, and does something to its file system before the n-th call of a function, or at an event.

    storage.py spmdkit.checkpoints.manager:Checkpoints.save 2 fill DISK train tiny.yaml
    storage.py event:os.rename:checkpoints/8' 1 readonly DISK train tiny.yaml
    storage.py event:os.mkdir:checkpoints/8 1 fail EDQUOT train tiny.yaml
    storage.py event:os.rename:checkpoints/ 0 slow 1.5 train tiny.yaml           at each of these events

Moments are those of die.py.
"""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from support.die import die_at_call, die_at_event


def fill(disk: str) -> None:
    """Writes until there is no room at all."""
    with (Path(disk) / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def readonly(disk: str) -> None:
    """Nothing can be written any more."""
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


def slow(seconds: str) -> None:
    """Whoever is here waits; other threads go on."""
    time.sleep(float(seconds))


def fail(name: str) -> None:
    """The operation fails as with an error of the system, such as EDQUOT of a quota."""
    number = getattr(errno, name)
    raise OSError(number, os.strerror(number))


ACTIONS = {"fill": fill, "readonly": readonly, "slow": slow, "fail": fail}


def tick(number: int, action: Callable[[], None]) -> Callable[[], None]:
    """Returns a function whose `number`-th call acts; each call where it is 0."""
    calls = count(1)

    def call() -> None:
        if number in (0, next(calls)):
            action()

    return call


if __name__ == "__main__":
    moment, number, name, argument, *arguments = sys.argv[1:]
    from spmdkit.launch.cli import main

    act = tick(int(number), lambda: ACTIONS[name](argument))
    if moment.startswith("event:"):
        die_at_event(*moment.split(":")[1:], act)
    else:
        die_at_call(*moment.split(":"), act)
    sys.exit(main(arguments))
