"""Charts: every point where its numbers say, round ticks, spikes kept, a sane size."""

import json
import math
import re

import pytest
from spmdkit.training.quantities import loss_text
from spmdkit.training.report.charts import MAX_POINTS, SIDE, Reference, Series, chart, smoothed, thinned, ticks


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


def test_the_tooltip_holds_the_exact_values():
    series = [Series("training", [(10, 3.25), (20, 2.5)]), Series("evaluation", [(20, 2.75)], "eval")]
    lines = data(chart("Loss", series, write=loss_text))
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


def test_thinning_keeps_ends_and_spikes():
    points = [(step, 2.0 + math.sin(step) / 10) for step in range(100_000)]
    points[54_321] = (54_321, 99.0)
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert (54_321, 99.0) in kept
    assert kept == sorted(set(kept))
    assert thinned(points[:50]) == points[:50]


def test_smoothing_keeps_the_steps_and_a_straight_line():
    straight = [(step, 3.0 * step) for step in range(300)]
    assert [step for step, _ in smoothed(straight)] == [step for step, _ in straight]
    assert [value for _, value in smoothed(straight)] == pytest.approx([value for _, value in straight])


def test_names_cannot_leave_the_page():
    html = chart("<b>", [Series("</script><b>", [(0, 1.0)])], [Reference("<i>", 1.0)], write=loss_text)
    assert html.count("</script>") == 1
    assert "<b></script>" not in html
    assert "<i>" not in html
    assert data(html)[0]["name"] == "</script><b>"
