"""The host's own work in one step of the training loop, in processor time of the thread that dispatches.

    next(batches), the check of its shapes   |  dispatch: JAX launches the compiled step  |  metrics two steps old, log
    ............... between ................|................... dispatch ...............|........ between ...........

`between` is everything from the return of one dispatch to the start of the next. `dispatch` is JAX's own launch of one
compiled program (arguments checked, donated and made on 8 devices). The same two numbers for a bare loop around a
hand-written step of as many arrays stand beside them: that loop too frees the old state and waits two steps behind.
Not counted: time spent waiting, and what other threads do, which is the computation, and the data thread, whose work is
given on its own since it shares Python's lock with the main thread.
"""

import time
from collections import deque
from typing import NamedTuple

import jax
import numpy as np
from spmdkit.data.batches import abstract_batch, train_batches
from spmdkit.data.source import take
from spmdkit.data.sources.arrays import from_arrays
from spmdkit.parallel.step.inputs import shapes_of
from spmdkit.training.loop import run_steps
from spmdkit.training.steps.late_log import RUN_AHEAD

ROWS, WARM_UP, STRETCH = 16, 20, 50


class HostWork(NamedTuple):
    """Microseconds of processor time a step: the median of that stretch of 50 steps in which it was least.

    Other programs on the machine push this one's data out of the caches; the quietest stretch is the least disturbed.
    `mean` is that of `between`, in its quietest stretch: the loop reads the metrics of four steps at once.
    """

    between: float
    dispatch: float
    data_thread: float = 0.0
    mean: float = 0.0


class _Timed:
    """A compiled function that notes the thread's processor time around each call."""

    def __init__(self, function):
        self._function = function
        self.calls = []

    def __call__(self, *arguments):
        start = time.thread_time()
        result = self._function(*arguments)
        self.calls.append((start, time.thread_time()))
        return result

    def work(self, data_thread=0.0):
        start, end = np.array(self.calls[WARM_UP:]).T * 1e6
        between = start[1:] - end[:-1]
        return HostWork(_quietest(between), _quietest(end - start), data_thread, _quietest(between, np.mean))


def _quietest(microseconds, of=np.median):
    return min(float(of(part)) for part in np.array_split(microseconds, max(1, len(microseconds) // STRETCH)))


def of_loop(step, config, steps):
    """The runtime's loop: batches from the data pipeline, metrics read and logged."""
    source, sharding = _TimedSource(config), step.plan.batch_sharding()
    shapes = abstract_batch(source, ROWS, sharding)
    timed = step._compiled[shapes_of(shapes)] = _Timed(step.compile(shapes))
    batches = train_batches(source, sharding, global_batch=ROWS, seed=0, start_step=0, num_steps=steps)
    run_steps(step, step.init(0), batches, log_every=10)
    return timed.work(source.microseconds_per_batch())


def of_bare_loop(bare, config, steps):
    """The least that a loop can be: one batch that is always there, and a wait that keeps the host two steps ahead."""
    step, state, sharding = bare
    arrays = {**_arrays(config, ROWS), "example": np.arange(ROWS, dtype=np.int32)}
    batch = {name: jax.device_put(array, sharding) for name, array in arrays.items()}
    timed, pending = _Timed(step), deque()
    for _ in range(steps):
        state, metrics = timed(state, batch)
        pending.append(metrics[0])
        if len(pending) > RUN_AHEAD:
            pending.popleft().block_until_ready()
    return timed.work()


def _arrays(config, rows):
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (rows, config.length)).astype(np.int32)
    return {"inputs": tokens, "targets": tokens, "weights": np.ones(tokens.shape, np.float32)}


class _TimedSource:
    """A source in memory that notes, once a batch, the processor time of the thread that reads it."""

    def __init__(self, config):
        self._source = from_arrays(_arrays(config, 512)).train
        self._marks = []

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        return self._source[index]

    def take(self, indices):
        self._marks.append(time.thread_time())
        return take(self._source, indices)

    def microseconds_per_batch(self):
        return _quietest(1e6 * np.diff(self._marks[WARM_UP:]))
