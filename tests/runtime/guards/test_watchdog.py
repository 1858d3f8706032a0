"""What counts as progress, how long what may take, and a process alone that makes none."""

import json
import socket
import subprocess
import sys
import threading
import time
from queue import Queue
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from spmdkit.configs.schema import Timeouts
from spmdkit.parallel.model.loss_sums import LossSums
from spmdkit.parallel.step.state import StepMetrics
from spmdkit.runtime.guards import watchdog as module
from spmdkit.runtime.guards.progress_notes import Deadlines, Note
from spmdkit.runtime.guards.watchdog import ClientWithTimeout, Unanswered, Watchdog, current_position
from spmdkit.training.times import Times
from support.processes import wait_for


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        (Note(5, "data", 0), (60, "timeouts.first_step")),
        (Note(5, "step", 0), (60, "timeouts.first_step")),
        (Note(6, "data", 0), (10, "timeouts.step")),
        (Note(5, "save", 0), (30, "timeouts.save")),
        (Note(5, "evaluation", 0), (10, "timeouts.step")),
    ],
)
def test_each_phase_has_its_deadline(note, expected):
    deadlines = Deadlines(Timeouts(step=10, first_step=60, save=30))
    deadlines.first = 5
    assert deadlines.of(note) == expected
    seconds = expected[0]
    assert [deadlines.passed(note._replace(seconds=each)) for each in (seconds - 1, seconds + 1)] == [False, True]


def test_the_first_step_of_a_start_has_its_own_deadline():
    watchdog, found = Watchdog(Timeouts(step=10, first_step=60), Times(""), lambda: None, None), []
    for _ in watchdog.batches(range(2), 4):
        found.append(watchdog._deadlines.of(watchdog._now()))
    assert found == [(60, "timeouts.first_step"), (10, "timeouts.step")]


def test_who_waits_for_a_slow_save_does_not_end_the_run():
    deadlines = Deadlines(Timeouts(step=10, save=30))
    waiting = Note(7, "step", 11)
    assert deadlines.may_go_on(Note(6, "save", 20), waiting)
    assert not deadlines.may_go_on(Note(6, "save", 31), waiting)
    assert not deadlines.may_go_on(Note(6, "step", 5), waiting), "no longer deadline than its own"
    assert not Deadlines(Timeouts(step=0)).passed(Note(1, "step", 10**6)), "0 = for ever"
    assert Deadlines(Timeouts(step=0, evaluation=5)).may_go_on(Note(7, "step", 99), Note(7, "evaluation", 6))


def test_the_stacks_are_dumped_late_if_a_deadline_is_set(monkeypatch):
    timers = []
    monkeypatch.setattr(module.faulthandler, "dump_traceback_later", lambda seconds, **_: timers.append(seconds))
    for seconds in (0, 9):
        Watchdog(Timeouts(step=seconds), Times(""), lambda: None, None)._set_timer(Note(2, "step", 0))
    assert timers == [9 + module.DUMP_AFTER_SECONDS]


@pytest.mark.parametrize(
    ("other", "expected"), [((6, "save"), True), ((8, "save"), False), ((6, "step"), False), (None, False)]
)
def test_only_a_process_behind_in_a_longer_phase_delays_the_end(other, expected):
    note = other and json.dumps([0.0, [*other, 11.0], []])
    watchdog = Watchdog(Timeouts(step=10, save=30), Times(""), lambda: None, None)
    client = SimpleNamespace(key_value_dir_get=lambda prefix: [(f"{prefix}1", note)])
    assert watchdog._is_delayed_in_time(client, Note(7, "step", 11)) == expected


def test_what_is_under_way_is_noted():
    watchdog, seen = Watchdog(Timeouts(), Times(""), lambda: None, None), []

    def doing():
        now = watchdog._now()
        return now and now[:2]

    def batches():
        for number in range(2):
            seen.append(doing())
            yield number

    for number in watchdog.batches(batches(), 4):
        seen.append(doing())
        if number == 1:
            with watchdog.phase(6, "save"):
                seen.append(doing())
    assert seen == [(5, "data"), (5, "step"), (6, "data"), (6, "step"), (6, "save")]
    watchdog.rest()
    assert doing() is None


def test_every_item_is_progress():
    watchdog = Watchdog(Timeouts(), Times(""), lambda: None, None)
    watchdog.note(3, "evaluation")
    for number, _ in enumerate(watchdog.goes_on(range(2)), 1):
        assert watchdog._now().seconds < 0.04
        assert watchdog._now().done == number
        time.sleep(0.05)
    assert watchdog._now()[:2] == (3, "evaluation")
    watchdog.note(4, "step")
    assert watchdog._now().done == 0


HANGS = """
import time
from spmdkit.configs.schema import Timeouts
from spmdkit.runtime.guards.watchdog import Watchdog
from spmdkit.training.times import Times
watchdog = Watchdog(Timeouts(step=1), Times(""), lambda: None, None)
with watchdog.watching():
    watchdog.note(3, "step")
    time.sleep(1.5 if {ends} else 60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_a_process_alone_ends_with_its_stacks(ends):
    before = time.monotonic()
    program = [sys.executable, "-c", HANGS.format(ends=ends).replace("1.5", "0.2")]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert ended.returncode == (0 if ends else 75)
    if ends:
        return
    assert time.monotonic() - before < 30
    assert "--- stacks of rank 0" in ended.stderr
    assert 'File "<string>", line 9 in <module>' in ended.stderr
    assert "error: No progress for more than 1 s (timeouts.step): step 3, step, for" in ended.stderr


@pytest.fixture
def half_failed():
    """A scalar on two devices: the first has no memory for it, and the second waits until the test is over."""
    over, mesh, whole = threading.Event(), Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec()

    def wait():
        return jax.pure_callback(lambda: over.wait(60) and np.float32(1), jax.ShapeDtypeStruct((), np.float32))

    waiting = jax.jit(jax.shard_map(wait, mesh=mesh, in_specs=(), out_specs=whole, check_vma=False))()
    more_than_any_address = 2**46
    failing = jax.jit(lambda factor: jax.lax.sort(jnp.arange(more_than_any_address, dtype=np.float32) * factor)[0])
    parts = [failing(jax.device_put(np.float32(1), jax.devices()[0])), waiting.addressable_shards[1].data]
    yield jax.make_array_from_single_device_arrays((), NamedSharding(mesh, whole), parts)
    over.set()
    waiting.block_until_ready()


@pytest.mark.parametrize("phase", ["step", "evaluation"])
def test_a_device_that_fails_while_another_waits_for_it_ends_the_run(phase, half_failed, monkeypatch, capfd):
    """Whoever waits for the whole array waits for ever: the deadline of the step would call that a hang."""
    codes, left = [], threading.Event()
    monkeypatch.setattr(module.os, "_exit", lambda code: (codes.append(code), left.set()))
    monkeypatch.setattr(module, "PUBLISH_SECONDS", 0.02)
    monkeypatch.setattr(module, "SECONDS_TO_RAISE", 0.1)
    step = SimpleNamespace(measure=lambda: LossSums(half_failed, half_failed))
    watchdog = Watchdog(Timeouts(step=60), Times(""), lambda: None, None)
    with watchdog.watching():
        watchdog.note(7, phase)
        if phase == "step":
            watchdog.follow(lambda: ("state", StepMetrics(half_failed, half_failed, half_failed)))()
        else:
            watchdog.follow(step).measure()
        assert left.wait(30), "the error of the device was not seen"
    assert codes[0] == 75
    said = capfd.readouterr().err
    assert "error: There is not enough memory: " in said
    place = "step 7" if phase == "step" else "step 7, evaluation"
    assert f"{place}, {jax.devices()[0]} of rank 0 on {socket.gethostname()}: " in said
    assert "Lower train.global_batch" in said


def test_the_thread_that_trains_has_time_to_raise_an_error_itself(half_failed, monkeypatch):
    clock, results = [100.0], module.Results()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    results.add("step 1", jnp.float32(1))
    assert results.failure() is None
    results.add("step 2", half_failed)
    while half_failed.addressable_shards[0].data.is_ready() is False:
        time.sleep(0.01)
    assert results.failure() is None, "seen for the first time"
    clock[0] += module.SECONDS_TO_RAISE - 0.1
    assert results.failure() is None
    clock[0] += 0.2
    assert "step 2, " in str(results.failure())


WAITS = "def waits(queue):\n    queue.get()\ndef calls(queue):\n    waits(queue)\n"
"""It stands in functions of Python's own."""


@pytest.mark.parametrize(
    ("name", "shown"),
    [("mine.py", "waits (mine.py)"), (f"{__file__}", "waits (tests/runtime/guards/test_watchdog.py)")],
    ids=["a user's", "the package's"],
)
def test_a_thread_that_waits_in_a_library(name, shown, tmp_path):
    module: dict = {"__name__": "mine"}
    exec(compile(WAITS, str(tmp_path / name), "exec"), module)
    queue: Queue = Queue()
    thread = threading.Thread(target=module["calls"], args=(queue,))
    thread.start()
    assert thread.ident is not None
    try:
        wait_for(lambda: current_position(thread.ident).at == shown, 10)
    finally:
        queue.put(None)
        thread.join()
    assert current_position(thread.ident).at == "", "it has ended"


class Client:
    """A service that stands still until it is let go."""

    def __init__(self):
        self.goes_on = threading.Event()

    def get(self, key, *, suffix=""):
        self.goes_on.wait(30)
        return key + suffix

    def fails(self):
        raise KeyError("gone")


def test_answers_and_errors_are_the_clients_own():
    client = Client()
    client.goes_on.set()
    client_with_timeout = ClientWithTimeout(client, 10)
    assert [client_with_timeout.get("a", suffix=str(number)) for number in range(3)] == ["a0", "a1", "a2"]
    with pytest.raises(KeyError, match="gone"):
        client_with_timeout.fails()
    with pytest.raises(AttributeError):
        _ = client_with_timeout.nothing


def test_a_service_that_stands_still_and_goes_on():
    client = Client()
    client_with_timeout = ClientWithTimeout(client, 0.2)
    with pytest.raises(Unanswered, match="process 0 did not answer"):
        client_with_timeout.get("a")
    begin = time.monotonic()
    with pytest.raises(Unanswered, match="an earlier"):
        client_with_timeout.get("a")
    assert time.monotonic() - begin < 0.15, "not asked again while it has not answered"
    client.goes_on.set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert client_with_timeout.get("b") == "b"
            return
        except Unanswered:
            time.sleep(0.01)
    raise AssertionError("it did not answer again")
