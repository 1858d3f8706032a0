"""The course of a run: time adds up to that of the ledger, and events stand where they happened."""

import pytest
from spmdkit.training.goodput import ledger_lines, read_goodput
from spmdkit.training.report.course import course_of

LEDGER = """\
{"kind": "begin", "seconds": 0.0, "at": 100.0}
{"kind": "start", "seconds": 4.0, "at": 100.0}
{"kind": "step", "seconds": 2.0, "at": 102.01, "from": 1, "to": 10}
{"kind": "data", "seconds": 1.0, "at": 102.02}
{"kind": "step", "seconds": 3.0, "at": 106.0, "from": 11, "to": 20}
{"kind": "save", "seconds": 0.5, "at": 106.0}
{"kind": "step", "seconds": 1.0, "at": 107.0, "from": 21, "to": 25}
{"kind": "restart", "seconds": 5.0, "at": 112.0}
{"kind": "lost", "seconds": 1.0, "at": 112.0, "from": 21, "to": 25}
{"kind": "begin", "seconds": 0.0, "at": 113.5}
{"kind": "start", "seconds": 1.5, "at": 113.5}
{"kind": "step", "seconds": 2.0, "at": 115.5, "from": 21, "to": 30}
{"kind": "save", "seconds": 0.25, "at": 115.5}
{"kind": "end", "seconds": 0.0, "at": 115.5}
{"kind": "st
"""
SKIPPED = [{"step": 10}, {"step": 22, "skipped": 1.0}, {"step": 24, "skipped": 1.0}, {"step": 30, "skipped": 3.0}]


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "goodput.jsonl"
    path.write_text(LEDGER)
    return path


def test_time_adds_up(ledger):
    course, sums = course_of(ledger_lines(ledger)), read_goodput(ledger)
    assert course.seconds == pytest.approx(sums.total) == pytest.approx(20.25)
    assert [stretch.step for stretch in course.stretches] == [0, 10, 20, 25, 20, 20, 30]
    for stretch in course.stretches:
        assert sum(stretch.seconds.values()) == pytest.approx(stretch.end - stretch.start)


def test_events_stand_where_they_happened(ledger):
    course = course_of(ledger_lines(ledger), SKIPPED)
    found = [(round(at, 6), mark.step, mark.kind, mark.text) for at, mark in course.events]
    assert found == [
        (10.5, 20, "save", "save of step 20"),
        (16.5, 20, "lost", "steps 21 to 25 were lost"),
        (16.5, 20, "start", "start 2, after step 20"),
        (20.25, 30, "save", "save of step 30"),
        (20.25, 22, "skipped", "1 update left out until here"),
        (20.25, 30, "skipped", "2 updates left out until here"),
    ]
    assert [mark.step for mark in course.marks] == [20, 20, 20, 22, 30, 30]


def test_no_ledger_is_no_course(tmp_path):
    course = course_of(ledger_lines(tmp_path / "missing"))
    assert (course.seconds, course.events, course.stretches) == (0.0, [], [])
