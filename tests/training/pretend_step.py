"""A step that only pretends, for tests of what the loop does around it."""

import time

import jax.numpy as jnp
import numpy as np
from spmdkit.parallel.step.state import StepMetrics, TrainState


class Late:
    """A scalar that is still being computed: it knows when it was first waited for."""

    def __init__(self, value: float, on_wait=lambda: None):
        self.value, self.on_wait = value, on_wait

    def block_until_ready(self) -> None:
        self.on_wait()
        self.on_wait = lambda: None

    def __float__(self) -> float:
        self.block_until_ready()
        return self.value


class PretendStep:
    """Counts steps; step n has loss 100 + n, takes `seconds` once it is waited for, and may go wrong."""

    def __init__(self, *, seconds: float = 0.0, losses: dict[int, float] | None = None, norms=None, params=None):
        self.started: list[int] = []
        self.awaited: list[tuple[int, int]] = []
        """Steps that were waited for, each with the newest step then started."""
        self.seconds, self.losses, self.norms, self.params = seconds, losses or {}, norms or {}, params or {}

    def __call__(self, state, batch):
        number = int(state.step) + 1
        self.started.append(number)
        loss = Late(self.losses.get(number, 100.0 + number), lambda: self._on_wait(number))
        norm = Late(self.norms.get(number, 1.0))
        return first_state(number, self.params.get(number, 1.0)), StepMetrics(loss, norm, Late(10.0))

    def _on_wait(self, number: int) -> None:
        time.sleep(self.seconds)
        self.awaited.append((number, self.started[-1]))


def first_state(step: int = 0, value: float = 1.0) -> TrainState:
    return TrainState(np.int32(step), {"w": jnp.full((2,), value), "count": jnp.int32(0)}, (), np.zeros(2, np.uint32))
