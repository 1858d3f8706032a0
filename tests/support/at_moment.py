"""Runs spmdkit, and acts before the n-th call of a function, or at the n-th event with a text; 0 = at each.

    python -m support.at_moment spmdkit.training.metrics:MetricsLog.write 3 signal SIGKILL train tiny.yaml
    python -m support.at_moment event:os.rename:checkpoints/8' 1 readonly DISK train tiny.yaml
    python -m support.at_moment event:os.mkdir:checkpoints/8 1 fail EDQUOT train tiny.yaml

Events are those that the interpreter audits.
"""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from support.fault_worker import replace


def fill(disk: str) -> None:
    """Writes until the disk is full."""
    with (Path(disk) / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def fail(name: str) -> None:
    """Raises an error of the operating system."""
    number = getattr(errno, name)
    raise OSError(number, os.strerror(number))


ACTIONS: dict[str, Callable[[str], object]] = {
    "signal": lambda name: os.kill(os.getpid(), getattr(signal, name)),
    "fill": fill,
    "readonly": lambda disk: subprocess.run(["mount", "-o", "remount,ro", disk], check=True),
    "slow": lambda seconds: time.sleep(float(seconds)),
    "fail": fail,
}

if __name__ == "__main__":
    moment, number, action, argument, *arguments = sys.argv[1:]
    from spmdkit.launch.cli import main

    calls = count(1)

    def act() -> None:
        if int(number) in (0, next(calls)):
            ACTIONS[action](argument)

    def acting(original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*given: Any, **options: Any) -> Any:
            act()
            return original(*given, **options)

        return function

    if moment.startswith("event:"):
        _, event, text = moment.split(":", 2)
        sys.addaudithook(lambda name, given: act() if name == event and text in str(given) else None)
    else:
        replace(moment, acting)
    sys.exit(main(arguments))
