"""Charts: the position of every point, round ticks, preserved spikes, and distinct lines."""

import math
import re

import pytest
from spmdkit.report import charts
from spmdkit.report.charts import Mark, Reference, Series, run_look, smooth, ticks
from spmdkit.report.templates import ENVIRONMENT
from spmdkit.training.quantities import loss_text


def chart(*series, references=(), marks=()):
    return charts.make_chart("Loss", series, references, write=loss_text, marks=marks)


def corners(line):
    return [tuple(map(float, corner.split(","))) for corner in line["corners"].split()]


def heights(labels):
    return {text: top for top, text, *_ in labels}


def test_draws_points_at_their_labels():
    drawn = chart(Series("training", [(10, 3.0), (20, 2.0), (30, 1.0)]), references=[Reference("bigram", 2.0)])
    (line,) = drawn["lines"]
    (first, top), (middle, half), (last, bottom) = corners(line)
    labels = heights(drawn["y_labels"])
    assert (first, middle, last) == (0, 50, 100)
    assert top < half < bottom
    assert (labels["3"], labels["1"]) == (pytest.approx(top), pytest.approx(bottom))
    assert heights(drawn["references"]) == {"bigram 2.0000": pytest.approx(half)}
    assert (line["name"], line["last"]) == ("training", "1.0000")
    assert drawn["description"] == "training: 3.0000 at step 10, 1.0000 at step 30, between 1.0000 and 3.0000."


@pytest.mark.parametrize("value", [0.5, 9.0])
def test_references_are_within_the_plot(value):
    drawn = chart(Series("training", [(10, 3.0), (20, 2.0)]), references=[Reference("bigram", value)])
    assert 0 <= drawn["references"][0][0] <= 100


@pytest.mark.parametrize(("last", "under"), [(3.0, True), (1.0, False)])
def test_places_reference_name_away_from_lines(last, under):
    drawn = chart(Series("a", [(0, 4.0), (9, last)]), references=[Reference("bigram", 2.0)])
    assert drawn["references"][0][2] == under


def test_tooltip_has_exact_values():
    series = [Series("training", [(10, 3.25), (20, 2.5)]), Series("evaluation", [(20, 2.75)], "eval")]
    assert chart(*series)["data"]["lines"] == [
        {"name": "training", "color": "train", "points": [[10, 0, "3.2500"], [20, 100, "2.5000"]]},
        {"name": "evaluation", "color": "eval", "points": [[20, 100, "2.7500"]]},
    ]


def test_wide_range_is_logarithmic():
    drawn = chart(Series("training", [(0, 1000.0), (1, 10.0), (2, 1.0)]))
    labels = heights(drawn["y_labels"])
    assert {"1", "10", "100", "1000"} <= set(labels)
    assert labels["100"] - labels["1000"] == pytest.approx(labels["1"] - labels["10"], abs=0.03)
    assert corners(drawn["lines"][0])[1][1] == pytest.approx(labels["10"])


@pytest.mark.parametrize("points", [[(5, 1.0)], [(5, 0.0), (6, 0.0)], [(0, -1.0), (10, 1e12)]], ids=str)
def test_draws_degenerate_ranges(points):
    (line,) = chart(Series("training", points))["lines"]
    assert all(math.isfinite(number) for corner in corners(line) for number in corner)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (1.45, 5.6, [2, 3, 4, 5]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_numbers(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_draws_one_mark_per_kind_and_place():
    marks = [Mark(15, "save", "save of step 15"), Mark(15, "save", "save of step 15"), Mark(20, "start", "start 2")]
    drawn = chart(Series("", [(10, 3.0), (20, 2.0)]), marks=[*marks, Mark(21, "lost", "outside")])
    assert drawn["marks"] == [("save", 50, 100, 94), ("start", 100, 100, 0)]
    assert drawn["data"]["marks"] == [[50, "save of step 15"], [100, "start 2"]]
    keys = re.findall(r">([^<]*)<", ENVIRONMENT.get_template("parts.html").module.mark_keys(drawn["marks"]))
    assert [key for key in keys if key.strip()] == ["started again", "save"]


def test_coinciding_lines_take_turns_in_stripes():
    """Without stripes, the second of two equal lines hides the first."""
    points = [(10, 4.5), (20, 3.25), (30, 2.125)]
    nearly, other = (
        [(step, change(value)) for step, value in points] for change in (lambda v: v * (1 + 1e-7), lambda v: v + 0.05)
    )
    touching = [points[0], (20, 4.0), (30, 3.0)]
    drawn = chart(Series("a", points), Series("b", nearly), Series("c", other), Series("d", touching))
    assert drawn["notes"] == ["in stripes, the same curve: a, b"]
    assert [(line["stripes"], line["dot_width"]) for line in drawn["lines"]] == [
        ("stroke-dasharray:9 9;stroke-dashoffset:0", 11),
        ("stroke-dasharray:9 9;stroke-dashoffset:-9", 7),
        ("", 7),
        ("", 7),
    ]


def test_long_lines_are_smoothed_and_short_ones_have_dots():
    short, medium, long = (
        chart(Series("", [(step, math.sin(step)) for step in range(count)]))["lines"][0] for count in (30, 59, 60)
    )
    assert [bool(line["dots"]) for line in (short, medium, long)] == [True, False, False]
    assert [bool(line["raw"]) for line in (short, medium, long)] == [False, False, True]


def test_runs_have_distinct_looks():
    assert len({run_look(number) for number in range(16)}) == 16
    assert (run_look(0), run_look(8)) == (("run0", False), ("run0", True))


def test_thinning_keeps_ends_and_spikes():
    points = [(step, 2.0 + math.sin(step) / 10) for step in range(100_000)]
    points[54_321] = (54_321, 99.0)
    kept = charts.thin(points)
    assert len(kept) <= charts.MAX_POINTS
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert (54_321, 99.0) in kept
    assert kept == sorted(set(kept))


def test_smoothing_keeps_steps_and_straight_lines():
    straight = [(step, 3.0 * step) for step in range(300)]
    assert smooth(straight) == [(step, pytest.approx(value)) for step, value in straight]
    peak = smooth([(step, 10.0 * (step == 150)) for step in range(300)])
    assert (peak[150][1], peak[155][1], peak[156][1]) == (pytest.approx(10 / 11), pytest.approx(10 / 11), 0)


def test_collects_only_finite_points():
    records = [{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": None}, {"loss": 1.0}, {"step": 5, "loss": 3}]
    assert charts.collect_points(records, "loss") == [(1, 2.0), (5, 3)]
