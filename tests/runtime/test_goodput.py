"""The ledger over restarts: every second once, lost steps taken from the steps, nothing lost by a line cut short."""

import json
import time

import pytest
from spmdkit.runtime import goodput
from spmdkit.runtime.goodput import Goodput, Ledger, read_goodput


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def first_start(path, *, ended=False, began=1000.0):
    """Ten steps of 0.1 s, the last two lines of them told at once."""
    ledger = Ledger(path, step=0, began=began)
    ledger.add(0, {"start": 2.0, "compile": 1.0})
    ledger.add(4, {"data": 0.05, "step": 0.4})
    ledger.add(4, {"save": 0.2})
    ledger.add(10, {"step": 0.6, "data": 0.0001})
    if ended:
        ledger.end()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "goodput.jsonl"


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The time of day stands at 1005 s unless a test moves it."""
    now = [1005.0]
    monkeypatch.setattr(goodput.time, "time", lambda: now[0])
    return now


def test_one_start(path):
    first_start(path)
    found = read_goodput(path)
    assert found.seconds == {"step": 1.0, "data": 0.05, "save": 0.2, "compile": 1.0, "start": 2.0}
    assert found.total == pytest.approx(4.25)
    assert found.share == pytest.approx(1 / 4.25)
    assert (found.starts, found.lost_steps) == (1, 0)
    steps = [(line["from"], line["to"]) for line in lines(path) if line["kind"] == "step"]
    assert steps == [(1, 4), (5, 10)]
    assert str(found).startswith("Goodput 23.5 % of 4.2 s (start 47.1 %, compile 23.5 %, save 4.7 %")


def test_a_death_loses_steps_and_time(path, clock):
    """Died at 1005 after step 10; started again at 1012 from step 6: steps 7 to 10 are 4 of the 6 in the last line."""
    first_start(path)
    clock[0] = 1015.0
    ledger = Ledger(path, step=6, began=1012.0)
    ledger.add(6, {"start": 3.0})
    ledger.add(12, {"step": 0.9})
    ledger.end()
    found = read_goodput(path)
    assert found.seconds["restart"] == pytest.approx(7.0)
    assert found.seconds["lost"] == pytest.approx(0.4)
    assert found.seconds["step"] == pytest.approx(1.0 - 0.4 + 0.9)
    assert (found.starts, found.lost_steps) == (2, 4)
    shown = str(Goodput({"step": 1.0}, 2, 1, 1))
    assert shown == "Goodput 100.0 % of 1.0 s, 2 starts, 1 rollback, 1 step computed again."
    assert next(line for line in lines(path) if line["kind"] == "lost") | {"at": 0} == {
        "kind": "lost", "seconds": 0.4, "at": 0, "from": 7, "to": 10,
    }  # fmt: skip


def test_the_same_steps_lost_twice_count_twice(path, clock):
    first_start(path)
    for began in (1010.0, 1020.0):
        clock[0] = began + 1
        ledger = Ledger(path, step=4, began=began)
        ledger.add(4, {"start": 0.5})
        ledger.add(10, {"step": 0.6})
    found = read_goodput(path)
    assert found.lost_steps == 12
    assert found.seconds["lost"] == pytest.approx(1.2)
    assert found.seconds["step"] == pytest.approx(1.0)
    assert found.seconds["restart"] == pytest.approx(5.0 + 9.0)


def test_time_of_a_step_that_is_not_done_counts_as_step(path):
    ledger = Ledger(path, step=0, began=1000.0)
    ledger.add(4, {"step": 0.4})
    ledger.add(4, {"step": 0.1})
    ledger.end()
    Ledger(path, step=2, began=1005.0)
    found = read_goodput(path)
    assert (found.seconds["step"], found.seconds["lost"], found.lost_steps) == pytest.approx((0.3, 0.2, 2))


def test_an_end_in_order_is_no_restart(path, clock):
    first_start(path, ended=True)
    clock[0] = 90_000.0
    ledger = Ledger(path, step=10, began=89_999.0)
    ledger.add(10, {"start": 1.0})
    assert "restart" not in read_goodput(path).seconds


def test_a_line_cut_short_is_left_out_and_the_next_stands_alone(path):
    first_start(path)
    whole = path.read_text()
    path.write_text(whole[:-20])
    ledger = Ledger(path, step=4, began=1006.0)
    ledger.add(4, {"start": 1.0})
    assert (read_goodput(path).starts, read_goodput(path).seconds["restart"]) == (2, 1.0)
    assert path.read_text().splitlines()[-1].startswith('{"kind": "start"')


def test_what_cannot_be_written_costs_nothing_else(tmp_path):
    (tmp_path / "goodput.jsonl").mkdir()
    ledger = Ledger(tmp_path / "goodput.jsonl", step=0, began=1000.0)
    ledger.add(1, {"step": 1.0})


def test_it_is_due_once_a_second(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "goodput.jsonl", step=0, began=1000.0)
    assert not ledger.is_due()
    later = time.monotonic() + 1.1
    monkeypatch.setattr(goodput.time, "monotonic", lambda: later)
    assert ledger.is_due()
    ledger.add(1, {"step": 1.0})
    assert not ledger.is_due()


def test_going_back_in_the_same_process_loses_steps_and_no_time_between(path):
    ledger = Ledger(path, step=0, began=1000.0)
    ledger.add(4, {"step": 0.4})
    ledger.add(10, {"step": 0.6, "start": 0.3})
    ledger.roll_back(6, 10)
    ledger.add(12, {"step": 0.5})
    ledger.end()
    found = read_goodput(path)
    assert found.seconds == pytest.approx({"step": 0.4 + 0.2 + 0.5, "lost": 0.4, "start": 0.3})
    assert (found.starts, found.lost_steps, found.rollbacks) == (1, 4, 1)
    assert ", 1 rollback, 4 steps computed again (lost" in str(found)
    steps = [(each["kind"], each["from"], each["to"]) for each in lines(path) if each["kind"] in ("step", "lost")]
    assert steps == [("step", 1, 4), ("step", 5, 10), ("lost", 7, 10), ("step", 7, 12)], "from its checkpoint on"
    Ledger(path, step=12, began=1005.0)
    assert read_goodput(path).lost_steps == 4, "the next start does not lose them again"


def test_a_link_in_place_of_the_ledger_is_not_followed(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "goodput.jsonl").symlink_to(mine)
    ledger = Ledger(tmp_path / "goodput.jsonl", step=0, began=time.time())
    ledger.add(1, {"step": 1.0})
    assert mine.read_text() == "mine"
