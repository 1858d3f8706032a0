"""The guards of a run together: the same program and the same numbers with and without, and what they leave."""

import sys
import threading
from types import SimpleNamespace

import jax
import pytest
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.checkpoints.replicas import ReplicaCheck
from spmdkit.configs import load_config
from spmdkit.launch.cli import main
from spmdkit.mesh.processes import local_copy
from spmdkit.parallel.step.train_step import Step
from spmdkit.runtime.build_run import build
from spmdkit.runtime.goodput import GOODPUT, Ledger, ledger_lines, read_goodput
from spmdkit.runtime.guards.guards import Guards
from spmdkit.runtime.guards.replica_guard import ReplicasDiffer
from spmdkit.training.steps.late_log import RUN_AHEAD
from support.faults import flip_in
from support.runs import metrics, write_config

ON = ("guards.replicas_every=3", "guards.stragglers=0.1", "timeouts.step=60", "timeouts.save=90")
GUARDS = tuple(f"spmdkit.{name}" for name in ("runtime.guards", "training.times", "runtime.goodput"))
OFF = ("guards.replicas_every=0", "guards.stragglers=0", "guards.ledger=false", "timeouts.step=0")


@pytest.mark.slow
def test_the_step_is_the_same_program(tmp_path):
    texts = []
    for overrides in (ON, OFF):
        built = build(load_config(write_config(tmp_path), overrides))
        texts.append(built.step.lower(built.batch).as_text())
    assert texts[0] == texts[1]
    assert "stablehlo" in texts[0]


def test_what_is_off_stands_in_no_ones_way(tmp_path):
    config = load_config(write_config(tmp_path), OFF)
    guards = Guards(config.guards, config.timeouts, lambda line: None)
    step, batches = object(), [1, 2]
    assert guards.step(step) is step
    assert type(guards.batches(batches, 0)) is type(iter(batches))
    assert (guards.after_step, guards.waited) == (None, None)
    guards.compare(1, ())
    guards.done(1)
    forgotten = []
    guards._replicas = SimpleNamespace(forget=lambda: forgotten.append(True))
    guards.suspend()
    assert forgotten, "the sums of a state before a rollback are not judged after it"


def test_the_ledger_needs_no_comparison_and_holds_steps_that_the_devices_have_done(tmp_path, monkeypatch):
    config = load_config(write_config(tmp_path), [*OFF, "guards.ledger=true"])
    guards = Guards(config.guards, config.timeouts, lambda line: None)
    guards.open(ReplicaCheck({}), tmp_path, 10)
    monkeypatch.setattr(Ledger, "is_due", lambda self: True)
    guards.times.switch("step")
    guards.after_step(40, {})
    assert [(line["from"], line["to"]) for line in ledger_lines(tmp_path / GOODPUT) if line["kind"] == "step"] == [
        (11, 40 - RUN_AHEAD)
    ]


@pytest.mark.parametrize("name", ["step", "first_step", "evaluation", "save"])
def test_one_deadline_is_enough_to_watch(name, tmp_path):
    config = load_config(write_config(tmp_path), [*OFF, f"timeouts.{name}=90"])
    guards = Guards(config.guards, config.timeouts, lambda line: None)
    before = {thread.name for thread in threading.enumerate()}
    with guards.watching():
        assert {thread.name for thread in threading.enumerate()} - before == {"watchdog"}
        next(iter(guards.batches([1], 0)))
        assert guards.watchdog._doing is not None


def test_the_results_of_a_watched_step_are_looked_at(tmp_path):
    config = load_config(write_config(tmp_path), ON)
    guards = Guards(config.guards, config.timeouts, lambda line: None)
    loss = jax.numpy.float32(2)
    step = guards.step(lambda state, batch: (state, SimpleNamespace(loss=loss)))
    guards.watchdog.note(3, "step")
    step("state", "batch")
    assert list(guards.watchdog._results._newest) == [("step 3", loss)]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [ON, OFF], ids=["on", "off"])
def test_calls_in_a_step(overrides, tmp_path):
    """Counted by the interpreter in whole runs of 8 and of 24 steps: off, 16 more steps make no call more."""
    counts = []
    for steps in (8, 24):
        config = write_config(tmp_path, eval={"every": 0, "batches": 1}, checkpoint={"every": 0})
        counts.append(guards_calls(["train", str(config), f"train.steps={steps}", "--fresh", *overrides]))
    assert (counts[1] - counts[0] >= 16) == (overrides is ON), counts
    assert overrides is ON or counts[0] == counts[1]


def guards_calls(words: list[str]) -> int:
    """How many functions of the guards a command calls in its own thread."""
    calls = 0

    def hear(frame, event, argument):
        nonlocal calls
        name = frame.f_globals.get("__name__", "")
        calls += event == "call" and name.startswith(GUARDS)

    sys.setprofile(hear)
    try:
        assert main(words) == 0
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    assert main(["train", str(write_config(folder)), *ON]) == 0
    return folder / "run"


@pytest.mark.slow
def test_the_numbers_are_the_same(guarded, tmp_path):
    assert main(["train", str(write_config(tmp_path)), *OFF]) == 0
    assert metrics(guarded) == metrics(tmp_path / "run")


def test_the_ledger_and_the_report_say_where_the_time_went(guarded):
    found = read_goodput(guarded / "goodput.jsonl")
    assert {"start", "compile", "step", "evaluation", "save"} <= found.seconds.keys()
    assert (found.starts, found.lost_steps) == (1, 0)
    assert "Where the time went" in (guarded / "report.html").read_text()


@pytest.mark.slow
def test_copies_are_compared_every_few_steps_and_before_every_save(tmp_path, monkeypatch, cli):
    """Saves are due at 4, 8 and 12, comparisons at 3, 6, 9 and 12."""
    looked = []

    def noting(self, number, found):
        looked.append(number)
        assert found == []

    monkeypatch.setattr("spmdkit.runtime.guards.replica_guard.ReplicaGuard._judge", noting)
    assert "is compared every 3 steps and before every save" in cli(0, "train", write_config(tmp_path), *ON).out
    assert looked == [3, 4, 6, 8, 9, 12]


def test_nothing_is_saved_after_a_find(tmp_path, monkeypatch, cli):
    def found(self, number, differences):
        if number >= 8:
            raise ReplicasDiffer(f"Step {number}: differs")

    def save(self, number, *more, **options):
        saved.append(number)
        return original(self, number, *more, **options)

    saved, original = [], Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", save)
    monkeypatch.setattr("spmdkit.runtime.guards.replica_guard.ReplicaGuard._judge", found)
    assert "error: Step 8: differs" in cli(75, "train", write_config(tmp_path), *ON).err
    assert saved == [4]
    assert not (tmp_path / "run" / "checkpoints" / "8").exists()


@pytest.mark.slow_cases("0-first element", "0-last element", "5-first element", "5-last element")
@pytest.mark.parametrize("byte", [2, -2], ids=["first element", "last element"])
@pytest.mark.parametrize("device", [0, 5])
def test_one_flipped_bit_is_never_saved_by_default(byte, device, tmp_path, monkeypatch, cli):
    """Each replica writes a slice and the checksum is of one replica: a flip would spoil one of the two."""
    original = Step.__call__

    def call(self, state, batch):
        if int(local_copy(state.step)) == 5:
            state = flip_in(state, "params/layers/0/kernel", jax.devices()[device], byte=byte, bit=4)
        return original(self, state, batch)

    monkeypatch.setattr(Step, "__call__", call)
    said = cli(75, "train", write_config(tmp_path, strategy={"data": 8})).err
    assert "error: Step 8: devices that hold copies of the same array hold other bits:\n  " in said
    assert f"params/layers/0/kernel: cpu:{device} (rank 0) has other bits than cpu:" in said
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["4"]
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 0
