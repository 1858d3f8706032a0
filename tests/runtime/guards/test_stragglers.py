"""Who is slow: a process whose own work the others wait for; not one that is slow once, nor one that waits itself."""

import time

import pytest
from spmdkit.runtime.guards.stragglers import OwnWork, Stragglers, Work, describe_straggler, slow_ranks


def work(data, python, step=0.100):
    """A process that waits for devices in what is left of a step."""
    return Work(20, step, data, step - data - python)


QUICK, READS, PYTHON = work(0.001, 0.004), work(0.090, 0.004), work(0.001, 0.080)


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ([QUICK, QUICK], []),
        ([QUICK, READS], [1]),
        ([QUICK, QUICK, PYTHON, QUICK], [2]),
        ([READS, QUICK, PYTHON, QUICK], [0, 2]),
        ([READS, READS, READS, QUICK], []),  # most are like that: nobody stands out
        ([QUICK, work(0.012, 0.004)], []),  # a tenth of a step
        ([QUICK, work(0.045, 0.004)], []),  # hidden: it waits for its devices all the same
        ([Work(20, 0.002, 0.0, 0.0019), Work(20, 0.002, 0.0018, 0.0)], []),  # a millisecond or two
    ],
)
def test_who_is_slow(works, expected):
    assert slow_ranks(works, 0.2) == expected


def test_figures_say_what_it_does():
    for works in ([QUICK, READS, QUICK], [QUICK, READS]):
        assert describe_straggler(1, works) == (
            "rank 1 delays every step: of the 100 ms of a step its own work takes 94 ms, 5 ms elsewhere (waiting for "
            "data 90 ms, 1 ms elsewhere; medians of 20 steps)."
        )


def test_it_is_said_once_and_taken_back():
    said = []
    stragglers = Stragglers(0.2, said.append)
    for works in ([QUICK, READS], [QUICK, READS], [QUICK, None], [QUICK, QUICK], [QUICK, QUICK], [READS, QUICK]):
        stragglers.compare(works)
    assert [line[:20] for line in said] == ["warning: rank 1 dela", "Rank 1 no longer del", "warning: rank 0 dela"]


def steps_of(own, *, data=0.0, python=0.0, wait=0.0, call=0.0, spin=0.0, number=5):
    """Runs a loop as `run_steps` does, with each part of a step as long as given."""

    def batches():
        for each in range(number):
            time.sleep(data)
            yield each

    def step(batch):
        time.sleep(call)
        end = time.thread_time() + spin
        while time.thread_time() < end:
            pass

    measured = own.calls(step)
    for batch in own.batches(batches()):
        measured(batch)
        before = time.perf_counter()
        time.sleep(wait)
        own.waited(time.perf_counter() - before)
        time.sleep(python)


@pytest.mark.slow_cases("parts0-0.08-0.08", "parts1-0.08-0.0")
@pytest.mark.parametrize(
    ("parts", "own", "data"),
    [
        ({"data": 0.08, "wait": 0.08}, 0.08, 0.08),
        ({"python": 0.08, "wait": 0.08}, 0.08, 0.0),
        ({"wait": 0.08}, 0.0, 0.0),
        ({"call": 0.08}, 0.0, 0.0),  # the backend waits within the call
        ({"spin": 0.08}, 0.08, 0.0),  # the call itself takes the processor
    ],
)
def test_what_counts_as_own_work(parts, own, data):
    measured = OwnWork(3)
    assert measured() is None
    steps_of(measured, **parts)
    found = measured()
    assert found
    assert found.steps == 3
    assert own <= found.own + 0.002
    assert found.own < own + 0.05
    assert data <= found.data + 0.002
    assert found.data < data + 0.05
    assert found.step >= sum(parts.values()) - 0.002


def test_one_slow_step_moves_no_median():
    measured = OwnWork(5)
    for data in (0.0, 0.0, 0.2, 0.0, 0.0, 0.0):
        steps_of(measured, data=data, number=1)
    found = measured()
    assert found
    assert found.data < 0.05
