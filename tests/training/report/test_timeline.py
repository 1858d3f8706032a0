"""The time split over time: every piece of time is divided wholly, and adds up to the sums."""

import re

import pytest
from spmdkit.training.report.charts import Mark
from spmdkit.training.report.course import Course, Stretch
from spmdkit.training.report.timeline import BINS, binned, timeline

STRETCHES = [
    Stretch(0.0, 3.0, {"start": 2.0, "compile": 1.0}, 0),
    Stretch(3.0, 4.0, {"step": 0.75, "data": 0.25}, 10),
    Stretch(4.0, 10.0, {"step": 5.0, "save": 1.0}, 20),
]


@pytest.mark.parametrize("count", [1, 3, 7, 160])
def test_pieces_of_time_add_up(count):
    bins = binned(STRETCHES, count)
    assert [sum(shares.values()) for shares in bins] == pytest.approx([1.0] * count)
    for kind in ("start", "compile", "step", "data", "save"):
        expected = sum(stretch.seconds.get(kind, 0.0) for stretch in STRETCHES)
        assert sum(shares.get(kind, 0.0) for shares in bins) * 10.0 / count == pytest.approx(expected)


def test_events_stand_above_their_time():
    html = timeline(Course(STRETCHES, [(4.0, Mark(10, "save", "save of step 10")), (10.0, Mark(20, "start", "<b>"))]))
    placed = re.findall(r'<path class="mark (\w+)" d="M([\d.]+) [^>]*><title>([^<]*)<', html)
    assert placed == [("save", f"{0.4 * BINS:.2f}", "save of step 10"), ("start", f"{BINS:.2f}", "&lt;b&gt;")]
    assert "<desc>10.0 s in all. 4.0 s: save of step 10." in html
    assert set(re.findall(r'<path class="(\w+)"', html)) == {"start", "compile", "step", "data", "save"}


def test_a_moment_is_not_drawn():
    assert timeline(Course(STRETCHES[:2], [])) == ""
    assert timeline(Course([], [])) == ""
