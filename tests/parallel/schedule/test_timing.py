"""What is right is timed and weighed as by hand."""

import pytest
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.schedule_table import Kind, check
from spmdkit.parallel.schedule.timing import (
    action_lengths,
    live_activations,
    live_inputs,
    measure,
    peak_activations,
    peak_inputs,
    tick_lengths,
)
from support.pipelines import TWO, parse


def test_a_tick_lasts_as_long_as_its_slowest_action():
    assert measure(parse(TWO)) == (7, 7, 7, 1 - 12 / 14)
    # ticks              F0 F1,F0 B0 B0,F1 W0,B1 B1,W0 W1,W1
    assert tick_lengths(parse(TWO), (1, 2, 3)) == [1, 1, 2, 2, 3, 3, 3]
    timing = measure(parse(TWO), (1, 2, 3))
    assert timing.time == 15
    assert timing.ideal_time == 14  # stage 1 makes the first gradient in 1 + 1 + 2; then stage 0 takes 2 + 3 + 2 + 3
    assert timing.bubble == pytest.approx(1 - 24 / 30)
    idle = parse("F0,F1,,,B0,W0,B1,W1\n,F0,B0,,F1,B1,W0,W1")
    assert measure(idle)[:2] == (8, 7), "idle ticks take no time"


@pytest.mark.parametrize("costs", [(1, 1), (1, 0, 1), (1, -1, 1), (1, float("nan"), 1), (1, float("inf"), 1)])
def test_costs_are_positive(costs):
    with pytest.raises(ValueError, match=r"costs must be three positive numbers, got .*\. Give those of forward"):
        measure(parse(TWO), costs)


def test_activations_live_to_the_end_of_their_weights():
    assert live_activations(parse(TWO), 0) == [1, 2, 2, 2, 2, 1, 1]
    assert live_activations(parse(TWO), 1) == [0, 1, 1, 2, 2, 2, 1]
    assert peak_activations(parse(TWO)) == [2, 2]
    assert peak_inputs(parse(TWO)) == [0, 0]


def test_recomputed_activations_live_from_there():
    table = parse("F0,F1,R0,B0,W0,R1,B1,W1\n,F0,B0,F1,B1,W0,W1,")
    check(table)
    assert (peak_activations(table), peak_inputs(table)) == ([1, 2], [2, 0])
    assert live_inputs(table, 0) == [1, 2, 2, 1, 1, 1, 0, 0]
    assert live_activations(table, 0) == [0, 0, 1, 1, 1, 1, 1, 1]


def test_a_chunk_costs_its_share_and_recomputing_a_forward():
    schedule = make_schedule("interleaved_1f1b", 2, 2, virtual=2)
    assert peak_activations(schedule) == [2, 1.5]
    lengths = action_lengths(schedule, (2, 3, 4))
    assert lengths == {Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.BACKWARD_INPUT: 1.5, Kind.BACKWARD_WEIGHT: 2}
