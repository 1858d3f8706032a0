"""Points: spikes and ends stay, steps stay, a straight line stays straight."""

import math

import pytest
from spmdkit.training.report.points import MAX_POINTS, points_of, smoothed, thinned


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


def test_records_without_a_number_are_left_out():
    records = [{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": None}, {"loss": 1.0}, {"step": 5, "loss": 3}]
    assert points_of(records, "loss") == [(1, 2.0), (5, 3)]
