"""A worker process that is killed is told as such, with the exit code of a machine's fault."""

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from spmdkit.data import from_examples
from spmdkit.data.sources.workers import WorkerLost, lost_worker
from spmdkit.training.ending.known_causes import known_cause


def example(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"inputs": np.full(2, number), "targets": number}


def pooled(epoch):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield from pool.map(example, range(8))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_worker_of_a_pool():
    stream = from_examples(pooled).train
    with pytest.raises(WorkerLost, match=r"the stream of examples of pooled has lost a worker process: .* terminated"):
        stream.take(np.arange(8))
    assert WorkerLost.exit_code == 75


class KeepsItsWorkers:
    """A loader whose workers outlive its epochs: it says that one was killed when the next epoch begins."""

    epoch = 0

    def __iter__(self):
        self.epoch += 1
        if self.epoch > 1:
            raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. ")
        return iter([{"inputs": np.ones(2)}])


def test_a_worker_that_is_killed_between_epochs():
    with pytest.raises(WorkerLost, match=r"the stream of examples of a KeepsItsWorkers has lost a worker process"):
        from_examples(KeepsItsWorkers()).train.take(np.arange(2))


@pytest.mark.parametrize(
    "said",
    [
        "DataLoader worker (pid(s) 4711) exited unexpectedly",
        "DataLoader worker (pid 4711) is killed by signal: Killed. ",
        "DataLoader timed out after 5 seconds",
    ],
)
def test_what_a_DataLoader_says_in_the_main_thread(said):
    cause = known_cause(RuntimeError(said))
    assert cause is not None
    assert cause.exit_code == 75
    assert said.strip().rstrip(".") in cause.message
    assert "/dev/shm" in cause.message


def test_other_errors_tell_of_no_worker():
    assert lost_worker(RuntimeError("DataLoader is confused")) == ""
    assert lost_worker(ValueError("DataLoader worker (pid 1)")) == ""

    def broken(epoch):
        yield {"inputs": np.ones(1)}
        raise RuntimeError("a mistake of mine")

    with pytest.raises(ValueError, match="a mistake of mine"):
        from_examples(broken).train.take(np.arange(2))
