"""Charts: every point where its numbers say, round ticks, spikes kept, a sane size."""

import json
import math
import re

import pytest
from spmdkit.training.quantities import loss_text
from spmdkit.training.report.charts import SIDE, Mark, Reference, Series, chart, run_kind, ticks


def polylines(html: str) -> list[list[tuple[float, float]]]:
    return [
        [tuple(map(float, corner.split(","))) for corner in points.split()]
        for points in re.findall(r'<polyline class="[^"]*" points="([^"]*)"', html)
    ]


def data(html: str):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html).group(1))


def heights(html: str, css: str) -> dict[str, float]:
    found = re.findall(rf'<span class="{css}" style="top:([\d.]+)%">([^<]*)</span>', html)
    return {text: float(top) * SIDE / 100 for top, text in found}


def test_points_are_drawn_where_the_labels_say():
    html = chart(
        "Loss", [Series("training", [(10, 3.0), (20, 2.0), (30, 1.0)])], [Reference("bigram", 2.0)], write=loss_text
    )
    (line,) = polylines(html)
    assert [x for x, _ in line] == [0, SIDE / 2, SIDE]
    labels = heights(html, "y")
    assert labels["3"] == pytest.approx(line[0][1], abs=0.2)
    assert labels["1"] == pytest.approx(line[2][1], abs=0.2)
    assert heights(html, "name") == {"bigram 2.0000": pytest.approx(line[1][1], abs=0.2)}
    assert f'class="reference" d="M0 {line[1][1]:.1f}H{SIDE}"' in html
    assert "training 1.0000" in html, "the legend holds the last value"


@pytest.mark.parametrize(("last", "css"), [(3.0, "name under"), (1.0, "name")])
def test_the_name_of_a_reference_is_not_under_the_lines(last, css):
    html = chart("Loss", [Series("a", [(0, 4.0), (9, last)])], [Reference("bigram", 2.0)], write=loss_text)
    assert f'<span class="{css}" style' in html


def test_the_tooltip_holds_the_exact_values():
    series = [Series("training", [(10, 3.25), (20, 2.5)]), Series("evaluation", [(20, 2.75)], "eval")]
    lines = data(chart("Loss", series, write=loss_text))["lines"]
    assert [(line["name"], [(point[0], point[3]) for point in line["points"]]) for line in lines] == [
        ("training", [(10, "3.2500"), (20, "2.5000")]),
        ("evaluation", [(20, "2.7500")]),
    ]


def test_wide_ranges_are_logarithmic():
    html = chart("Loss", [Series("training", [(0, 1000.0), (1, 10.0), (2, 1.0)])], write=loss_text)
    (line,) = polylines(html)
    labels = heights(html, "y")
    assert {"1", "10", "100", "1000"} <= set(labels)
    assert labels["100"] - labels["1000"] == pytest.approx(labels["1"] - labels["10"], abs=0.3)
    assert line[1][1] == pytest.approx(labels["10"], abs=0.2)


@pytest.mark.parametrize(
    "points",
    [
        [(5, 1.0)],  # one point
        [(5, 0.0), (6, 0.0)],  # no range
        [(0, -1.0), (10, 1e12)],  # negative and huge
    ],
)
def test_degenerate_ranges_are_drawn(points):
    html = chart("Loss", [Series("training", points)], write=loss_text)
    assert all(math.isfinite(number) for line in polylines(html) for point in line for number in point)
    assert "nan" not in html


def test_a_chart_without_points_is_nothing():
    assert chart("Loss", [Series("training", [])], [Reference("bigram", 2.0)], write=loss_text) == ""


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (1.45, 5.6, [2, 3, 4, 5]),
        (0.0001, 0.00101, [0.0002, 0.0004, 0.0006, 0.0008, 0.001]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_numbers_in_the_range(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_names_cannot_leave_the_page():
    html = chart("<b>", [Series("</script><b>", [(0, 1.0)])], [Reference("<i>", 1.0)], write=loss_text)
    assert html.count("</script>") == 1
    assert "<b></script>" not in html
    assert "<i>" not in html
    assert data(html)["lines"][0]["name"] == "</script><b>"


def test_marks_stand_at_their_steps():
    """One of each kind in a place; those beyond the lines are left out; the legend says what they are."""
    marks = [Mark(15, "save", "save of step 15"), Mark(15, "save", "save of step 15"), Mark(20, "start", "start 2")]
    html = chart("Loss", [Series("", [(10, 3.0), (20, 2.0)])], write=loss_text, marks=[*marks, Mark(21, "lost", "no")])
    drawn = re.findall(r'<path class="mark (\w+)" d="M([\d.]+) ', html)
    assert drawn == [("save", "500.0"), ("start", "1000.0")]
    assert data(html)["marks"] == [[0.5, "save of step 15"], [1.0, "start 2"]]
    assert re.findall(r'<span class="key mark \w+">([^<]*)<', html) == ["started again", "save"]


def test_a_chart_is_told_in_words():
    html = chart("Loss", [Series("a", [(1, 3.0), (2, 5.0), (3, 4.0)])], write=loss_text)
    assert "<title>Loss</title>" in html
    words = "a: 3.0000 at step 1, 4.0000 at step 3, between 3.0000 and 5.0000."
    assert f"<desc>{words}</desc>" in html


def test_every_run_has_a_look_of_its_own():
    assert len({run_kind(number) for number in range(16)}) == 16
