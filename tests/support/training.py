"""The training loop around a step that only counts, fake steps and loaders, and small optimizations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from spmdkit.parallel.step.state import StepMetrics, TrainState
from spmdkit.training.callbacks.callback import Run
from spmdkit.training.callbacks.conductor import Conductor
from spmdkit.training.callbacks.rate_factor import adjustable
from spmdkit.training.loop import run_steps
from spmdkit.training.optimizing.optimizers import make_optimizer
from spmdkit.training.stopping.gate import Gate

OPTIMIZER = adjustable(optax.sgd(1.0))
PARAMS = {"w": jnp.ones(2)}


class Played(NamedTuple):
    """The result of `play`."""

    step: int
    records: list[dict[str, Any]]
    saved: dict[int, dict[str, Any]]
    said: list[str]
    ended: Any
    run: Run
    state: TrainState


def start_state(step: int = 0) -> TrainState:
    return TrainState(jnp.int32(step), PARAMS, OPTIMIZER.init(PARAMS), np.zeros(2, np.uint32))


def play(
    *callbacks: Any,
    folder: Path = Path("."),
    steps: int = 12,
    start: int = 0,
    losses: Sequence[float] = (),
    every: int = 2,
    saves: Sequence[int] = (),
    notes: Mapping[str, Any] | None = None,
    state: TrainState | None = None,
    step_batch: tuple[int, int] = (0, 0),
) -> Played:
    """Trains; after each `every` steps an evaluation gives the next of `losses`, for the whole run."""
    said: list[str] = []
    saved: dict[int, dict[str, Any]] = {}
    records: list[dict[str, Any]] = []
    batch, examples = step_batch
    run = Run(
        folder=folder,
        start=start,
        num_steps=steps,
        batch=batch,
        examples=examples,
        evaluates=bool(losses),
        say=said.append,
        can_scale=True,
    )
    gate = Gate()
    conductor = Conductor(
        {f"{place} ({type(each).__name__})": each for place, each in enumerate(callbacks)},
        run,
        gate,
        evaluates_at=lambda number: bool(losses) and number % every == 0,
        saves_at=lambda number: number in saves,
        evaluate=lambda number, state: {"eval_loss": losses[min(number // every, len(losses)) - 1]},
        save=lambda number, state, notes: saved.update({number: dict(notes)}),
    )
    conductor.restore(notes or {})

    def step(state, batch):
        _, opt_state = OPTIMIZER.update(PARAMS, state.opt_state, PARAMS)
        metrics = StepMetrics(jnp.float32(int(state.step) + 1), jnp.float32(1), jnp.float32(1))
        return state._replace(step=state.step + 1, opt_state=opt_state), metrics

    def record(progress):
        records.append({"step": progress.step, "loss": progress.loss, **progress.extra})
        conductor.logged(records[-1])

    try:
        state = conductor.begin(state or start_state(start))
        state = run_steps(
            step,  # pyright: ignore
            state,
            [{}] * (steps - start),
            start=start,
            log_every=1,
            on_progress=record,
            pause_at=conductor.pauses_at,
            on_pause=conductor.pause,
            after_pause=conductor.after_pause,
            may_start=conductor.may_start,
        )
        conductor.end(state)
    finally:
        conductor.close()
    return Played(int(state.step), records, saved, said, conductor.ended, run, state)


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
    """Counts steps; step n has loss 100 + n, and may go wrong."""

    def __init__(self, *, losses: dict[int, float] | None = None, norms=None):
        self.started: list[int] = []
        self.awaited: list[tuple[int, int]] = []
        """Steps that were waited for, each with the newest step then started."""
        self.losses, self.norms = losses or {}, norms or {}

    def __call__(self, state, batch):
        number = int(state.step) + 1
        self.started.append(number)
        loss = Late(self.losses.get(number, 100.0 + number), lambda: self._on_wait(number))
        norm = Late(self.norms.get(number, 1.0))
        return first_state(number), StepMetrics(loss, norm, Late(10.0))

    def _on_wait(self, number: int) -> None:
        self.awaited.append((number, self.started[-1]))


def first_state(step: int = 0) -> TrainState:
    return TrainState(np.int32(step), {"w": jnp.ones(2), "count": jnp.int32(0)}, (), np.zeros(2, np.uint32))


LOADER_ROWS = 30


class Loader:
    """As a DataLoader: (inputs, targets) in batches of four, shuffled anew each time; the last one is small."""

    def __init__(self, rows=LOADER_ROWS, seed=None):
        self.rows, self.random, self.times = rows, np.random.default_rng(seed), 0

    def __iter__(self):
        self.times += 1
        order = self.random.permutation(self.rows)
        for start in range(0, self.rows, 4):
            chosen = order[start : start + 4]
            yield np.stack([chosen, chosen], 1).astype(np.float32), chosen


def epoch(number):
    """A function of the epoch: the same rows every time it is asked."""
    return Loader(seed=number)


def stacked_params(seed=0, **head):
    """A tree like a BlockModel's: two blocks of a matrix and a norm; `head` has shapes of more parameters."""
    random = np.random.default_rng(seed)
    shapes = {
        "embed": {"tokens": (6, 4)},
        "blocks": {"kernel": (2, 4, 8), "norm": (2, 4)},
        "head": {"logits": (4, 6), **head},
    }
    draw = lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def quadratic(params, goal):
    return sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(goal), strict=True)) / 2


def train(config, params, goal, steps, **options):
    optimizer = make_optimizer(config, steps, jax.eval_shape(lambda: params), **options)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(quadratic)(params, goal), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def updated(optimizer, params, given):
    """The optimizer's state and the parameters after each update with these gradients."""
    state = optimizer.init(params)
    for gradients in given:
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        yield state, jax.device_get(params)


def one_update(config, params, gradients):
    optimizer = make_optimizer(config, 10, params)
    return optimizer.update(gradients, optimizer.init(params), params)[0]
