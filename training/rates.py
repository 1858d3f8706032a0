"""The learning rates of a run as numbers on the host, worked out a window of steps at a time.

No step waits for its rate, and a run of a billion steps holds no billion of them.
"""

import numpy as np
import optax

WINDOW = 2**16
"""Steps whose rates are worked out together."""
LOOKED_AT = 2**20
"""Steps whose rates are looked at before a run starts, besides those of its last window."""


class LearningRates:
    """The learning rate of each step; indexed like an array of them."""

    def __init__(self, schedule: optax.Schedule, num_steps: int) -> None:
        """Works out nothing yet.

        Args:
            schedule: A function of an array of steps.
            num_steps: Optimizer steps in the whole run.
        """
        self._schedule = schedule
        self._num_steps = num_steps
        self._first = 0
        self._window = np.zeros(0)

    def __len__(self) -> int:
        """Steps in the whole run."""
        return self._num_steps

    def __getitem__(self, step: int) -> float:
        """The learning rate of a step, 0 <= step < len.

        Raises:
            IndexError: There is no such step.
        """
        if not 0 <= step < self._num_steps:
            raise IndexError(f"step {step} of {self._num_steps}")
        if not self._first <= step < self._first + len(self._window):
            self._first = step // WINDOW * WINDOW
            self._window = self._rates(self._first)
        return float(self._window[step - self._first])

    def first_not_finite(self) -> int | None:
        """The first step whose rate is no finite number of float32, of the first million steps and the last ones."""
        last = (self._num_steps - 1) // WINDOW * WINDOW
        for first in dict.fromkeys((*range(0, min(self._num_steps, LOOKED_AT), WINDOW), last)):
            with np.errstate(over="ignore"):
                wrong = np.flatnonzero(~np.isfinite(self._rates(first).astype(np.float32)))
            if len(wrong):
                return first + int(wrong[0])
        return None

    def _rates(self, first: int) -> np.ndarray:
        """The rates of the window that begins at a step."""
        steps = np.arange(first, min(first + WINDOW, self._num_steps))
        return np.broadcast_to(np.asarray(self._schedule(steps)), steps.shape)  # pyright: ignore
