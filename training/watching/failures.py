"""Programs that have failed on one device of this process while its other devices wait for that one.

An array of several devices is ready when all of its parts are. If one device has failed, from lack of memory for
example, the others wait for it in a collective, and so does the thread that reads the array: it never gets the error.
"""

import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from ..steps.late_log import RUN_AHEAD

SECONDS_TO_RAISE = 3.0
"""How long the thread that trains has to find the error itself: it does if all devices of the process have failed."""


class Followed:
    """A step that hands on an array of every call: one that no later call consumes."""

    def __init__(self, step: Any, add: Callable[[jax.Array], None]) -> None:
        """Takes a step and what gets the arrays."""
        self._step, self._add = step, add

    def __call__(self, *arguments: Any) -> Any:
        """Runs the step."""
        state, metrics = self._step(*arguments)
        self._add(metrics.loss)
        return state, metrics

    def measure(self, *arguments: Any) -> Any:
        """Evaluates, as the step does."""
        sums = self._step.measure(*arguments)
        self._add(sums.total)
        return sums

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


class Results:
    """The newest results of the programs of this process, looked at by a thread that waits for none of them."""

    def __init__(self) -> None:
        self._newest: deque[tuple[str, jax.Array]] = deque(maxlen=RUN_AHEAD + 2)
        self._failed_at: float | None = None

    def add(self, place: str, result: jax.Array) -> None:
        """Adds an array that a program is computing.

        Args:
            place: The step that the program belongs to, for the message.
            result: Not consumed by a later program.
        """
        self._newest.append((place, result))

    def failure(self) -> RuntimeError | None:
        """Returns the oldest error once the thread that trains has had time to raise it; None if there is none.

        The error also names the step, the device, its process and its host.
        """
        found = next((f"{place}, {error}" for place, result in list(self._newest) for error in _errors(result)), None)
        if found is None:
            return None
        self._failed_at = self._failed_at or time.monotonic()
        waited = time.monotonic() - self._failed_at
        return jax.errors.JaxRuntimeError(found) if waited >= SECONDS_TO_RAISE else None


def _errors(result: jax.Array) -> list[str]:
    """The errors of the devices of this process that have failed to compute their parts of an array."""
    errors = []
    for shard in result.addressable_shards:
        if shard.data.is_ready():
            try:
                shard.data.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                errors.append(f"{shard.device} of rank {jax.process_index()} on {socket.gethostname()}: {error}")
    return errors
