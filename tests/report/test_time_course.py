"""The time split: times add up to those of the ledger, and events are at their times."""

import re

import pytest
from spmdkit.report.charts import Mark
from spmdkit.report.templates import ENVIRONMENT
from spmdkit.report.time_course import BINS, Course, Stretch, course_of, divide, make_timeline, shares
from spmdkit.runtime.goodput import Goodput, ledger_lines, read_goodput

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
STRETCHES = [
    Stretch(0.0, 3.0, {"start": 2.0, "compile": 1.0}, 0),
    Stretch(3.0, 4.0, {"step": 0.75, "data": 0.25}, 10),
    Stretch(4.0, 10.0, {"step": 5.0, "save": 1.0}, 20),
]


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "goodput.jsonl"
    path.write_text(LEDGER)
    return path


def test_times_add_up_to_the_ledger(ledger):
    course, sums = course_of(ledger_lines(ledger)), read_goodput(ledger)
    assert course.seconds == pytest.approx(sums.total) == pytest.approx(20.25)
    assert [stretch.step for stretch in course.stretches] == [0, 10, 20, 25, 20, 20, 30]
    for stretch in course.stretches:
        assert sum(stretch.seconds.values()) == pytest.approx(stretch.end - stretch.start)


def test_events_have_their_times(ledger):
    course = course_of(ledger_lines(ledger), SKIPPED)
    found = [(round(mark.at, 6), *mark[:3]) for mark in course.events]
    assert found == [
        (10.5, 20, "save", "save of step 20"),
        (16.5, 20, "lost", "steps 21 to 25 were lost"),
        (16.5, 20, "start", "start 2, after step 20"),
        (20.25, 30, "save", "save of step 30"),
        (20.25, 22, "skipped", "1 update skipped so far"),
        (20.25, 30, "skipped", "2 updates skipped so far"),
    ]


def test_repeated_saves_and_restarted_counts():
    """Two saves of one step are one event; the count of skipped updates starts again with a new process."""
    saves = [{"kind": "save", "seconds": 1.0, "at": at} for at in (1.0, 2.0)]
    counts = [{"step": step, "skipped": total} for step, total in ((1, 2.0), (2, 0.0), (3, 1.0))]
    texts = [mark.text for mark in course_of(saves, counts).events]
    assert texts == ["save of step 0", "2 updates skipped so far", "1 update skipped so far"]


@pytest.mark.parametrize("count", [1, 3, 7, 160])
def test_intervals_add_up(count):
    bins = divide(STRETCHES, count)
    assert [sum(split.values()) for split in bins] == pytest.approx([1.0] * count)
    for kind in ("start", "compile", "step", "data", "save"):
        expected = sum(stretch.seconds.get(kind, 0.0) for stretch in STRETCHES)
        assert sum(split.get(kind, 0.0) for split in bins) * 10.0 / count == pytest.approx(expected)


def test_timeline_places_events_and_areas():
    events = [Mark(10, "save", "save of step 10", 4.0), Mark(20, "start", "<b>", 10.0)]
    drawn = make_timeline(Course(STRETCHES, events))
    assert drawn["events"] == [("save", f"{0.4 * BINS:.2f}", "save of step 10"), ("start", f"{BINS:.2f}", "<b>")]
    assert drawn["description"].startswith("10.0 s in total. 4.0 s: save of step 10.")
    areas = dict(drawn["areas"])
    assert set(areas) == {"start", "compile", "step", "data", "save"}
    assert areas["step"].startswith("M48 100.0h1v-75.0h-1z"), "the bottom layer"
    assert areas["save"].startswith(f"M64 {100 * (1 - 5 / 6):.1f}h1v-16.7h-1z"), "stacked on the steps"


def test_short_or_missing_course_is_not_drawn(tmp_path):
    assert make_timeline(Course(STRETCHES[:2], [])) is None
    assert course_of(ledger_lines(tmp_path / "missing")) == Course([], [])
    assert make_timeline(Course([], [])) is None


def test_bar_has_a_part_for_every_kind():
    goodput = Goodput({"step": 930.0, "save": 20.0, "start": 30.0, "lost": 15.0, "restart": 5.0}, 3, 1200)
    macros = ENVIRONMENT.get_template("parts.html").module
    parts = re.findall(r'<i class="(\w+)" style="flex-grow:([\d.]+)"', macros.goodput_bar(goodput))
    expected = {"step": 0.93, "lost": 0.015, "save": 0.02, "start": 0.03, "restart": 0.005}
    assert [(kind, float(share)) for kind, share in parts] == [*expected.items()]
    assert "goodput 93.0 % of 16:40 min, 3 starts, 1,200 steps computed again" in macros.goodput_text(goodput)
    assert shares(goodput)[0] == ("step", "steps that count", pytest.approx(93.0), "15:30 min")
