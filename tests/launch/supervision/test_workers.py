"""What is done to the processes of a run, against real ones: started, stopped, signalled, read to their end."""

import os
import signal
import sys
import time
from queue import SimpleQueue

import pytest
from spmdkit.launch.supervision.blame import Exit
from spmdkit.launch.supervision.terminal import Screen
from spmdkit.launch.supervision.workers import (
    Start,
    Worker,
    end_guard,
    finish_reading,
    halted_ranks,
    send,
    start_guard,
    start_worker,
    watch,
)


@pytest.fixture
def begin(tmp_path):
    """Starts a program as the next rank, under one guard; all are killed in the end."""
    guard, screen = start_guard(), Screen.of(sys.stdout, sys.stderr)
    workers: list[Worker] = []

    def one(program: str, **options) -> Worker:
        start = Start([sys.executable, "-u", "-c", program], dict(os.environ), **options)
        workers.append(start_worker(len(workers), start, tmp_path, screen, guard))
        return workers[-1]

    yield one
    send(workers, signal.SIGKILL)
    end_guard(guard)
    finish_reading(workers, screen)


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_leads_a_group_and_its_end_is_an_event(begin):
    events: SimpleQueue = SimpleQueue()
    worker = begin("import os; print(os.getpgid(0)); raise SystemExit(3)")
    watch(worker, events)
    assert events.get(timeout=10) == Exit(0, 3)
    until(lambda: worker.out)
    assert list(worker.out) == [str(worker.process.pid)]


def test_a_process_that_was_stopped_is_told_from_those_that_run(begin):
    workers = [begin("import time; time.sleep(60)") for _ in range(2)]
    assert halted_ranks(workers) == []
    send(workers[1:], signal.SIGSTOP)
    until(lambda: halted_ranks(workers) == [1])
    send(workers, signal.SIGKILL)
    assert [worker.process.wait(timeout=10) for worker in workers] == [-signal.SIGKILL] * 2
    send(workers, signal.SIGKILL)  # to nobody


def test_another_signal_in_place_of_one(begin):
    worker = begin("import time; time.sleep(60)", signals={signal.SIGUSR1: signal.SIGTERM})
    send([worker], signal.SIGUSR1)
    assert worker.process.wait(timeout=10) == -signal.SIGTERM


def test_what_it_prints_is_in_its_log_and_its_last_lines_are_at_hand(begin, tmp_path):
    worker, log = begin("import sys; print('out'); print('err', file=sys.stderr)"), tmp_path / "rank-0.log"
    assert worker.process.wait(timeout=10) == 0
    until(lambda: worker.out and worker.err and len(log.read_text().splitlines()) == 3)
    assert (list(worker.out), list(worker.err)) == (["out"], ["err"])
    first, *lines = log.read_text().splitlines()
    assert f"process {worker.process.pid}: {sys.executable} -u -c" in first
    assert sorted(lines) == ["err", "out"]
