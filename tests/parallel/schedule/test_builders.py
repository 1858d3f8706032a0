"""Every schedule can run, and takes the time and the memory that its formula says, for all sizes of a grid."""

import time

import pytest
from spmdkit.parallel.schedule.builders import SCHEDULES, forwards_only, make_schedule
from spmdkit.parallel.schedule.schedule_table import Kind, check
from spmdkit.parallel.schedule.timing import measure, peak_activations, peak_inputs


def group(S: int, M: int) -> int:
    """The most microbatches in one of M // S groups that are as equal as they can be."""
    return -(-M // (M // S))


# name: time at unit costs, most activations of stage s in microbatches
FORMULAS = {
    "gpipe": (lambda S, M, V: 3 * (M + S - 1), lambda s, S, M, V: M),
    "1f1b": (lambda S, M, V: 3 * (M + S - 1), lambda s, S, M, V: S - s),
    "interleaved_1f1b": (lambda S, M, V: 3 * (M + (S - 1) / V), lambda s, S, M, V: ((V - 1) * group(S, M) + S - s) / V),
    "zb_h1": (lambda S, M, V: 3 * M + S - 1, lambda s, S, M, V: S),
    "zbv": (
        lambda S, M, V: 3 * M + max((S - 1) / 2, 2 * S - 1 - M),
        lambda s, S, M, V: min(S, (M + 1 + s) / 2 if S > 1 else S),
    ),
}
CASES = [(name, None) for name in SCHEDULES] + [("interleaved_1f1b", virtual) for virtual in (1, 3, 4)]
SIZES = [(S, M) for S in range(1, 9) for M in range(S, 25)]


def hold_to_formulas(name: str, S: int, M: int, virtual: int | None) -> None:
    schedule = make_schedule(name, S, M, virtual=virtual)
    check(schedule)
    V = schedule.chunks
    time_of, peak_of = FORMULAS[name]
    timing = measure(schedule)
    assert timing.time == timing.ideal_time == pytest.approx(time_of(S, M, V), rel=1e-12), (S, M)
    assert timing.ticks == round(timing.time * V), (S, M)
    assert timing.bubble == pytest.approx(1 - 3 * M / timing.time, abs=1e-12), (S, M)
    assert peak_activations(schedule) == [peak_of(s, S, M, V) for s in range(S)], (S, M)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "virtual"), CASES)
def test_formulas(name, virtual):
    for S, M in SIZES:
        hold_to_formulas(name, S, M, virtual)


@pytest.mark.parametrize("name", SCHEDULES)
def test_recomputing_takes_a_forward_each_and_no_idle_tick(name):
    for S, M in ((1, 1), (2, 5), (4, 4), (4, 8), (8, 13)):
        plain, recomputed = make_schedule(name, S, M), make_schedule(name, S, M, recompute=True)
        check(recomputed)
        assert measure(recomputed).time == measure(recomputed).ideal_time == pytest.approx(measure(plain).time + M)
        assert max(peak_inputs(recomputed)) <= max(peak_activations(plain))
        if recomputed.joint:
            assert peak_activations(recomputed) == [1 / recomputed.chunks] * S
        for actions in recomputed.by_stage:
            again = [action[1:] for action in actions if action and action.kind == Kind.RECOMPUTE]
            assert again == [action[1:] for action in actions if action and action.kind == Kind.BACKWARD_INPUT]


def test_interleaved_with_one_chunk_is_1f1b():
    assert make_schedule("interleaved_1f1b", 4, 9, virtual=1).by_stage == make_schedule("1f1b", 4, 9).by_stage


@pytest.mark.parametrize(
    ("arguments", "virtual", "message"),
    [
        *[((name, 4, 3), None, "^strategy.pipe.microbatches=3 is fewer .*: 3 < 4, .*size to 3") for name in SCHEDULES],
        (("1fb1", 2, 4), None, r"Unknown schedule '1fb1'; known: gpipe, .* Did you mean '1f1b'\?"),
        (("gpipe", 0, 4), None, "strategy.pipe: size=0, .* must be at least 1 each"),
        (("zb_h1", 2, 4), 2, r"zb_h1 has 1 chunk on each stage, not 2\. .* or take interleaved_1f1b\.$"),
        (("zbv", 4, 3), 1, r"=3 is fewer .*\nzbv has 2 chunks .* not 1"),
    ],
)
def test_rejects_names_and_sizes(arguments, virtual, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments, virtual=virtual)


def test_large_tables_are_made_at_once():
    start = time.monotonic()
    schedule = make_schedule("1f1b", 16, 256)
    check(schedule)
    measure(schedule)
    assert time.monotonic() - start < 5  # 0.3 s on an idle machine


def forwards(name, stages, microbatches):
    return forwards_only(make_schedule(name, stages, 8), microbatches)


def test_forwards_keep_the_placement_and_only_fill_and_drain():
    schedule = forwards("zbv", 2, 3)
    assert (schedule.chunks, schedule.placement, schedule.stages, schedule.microbatches) == (2, "v", 2, 3)
    assert [forwards("1f1b", 3, microbatches).num_ticks for microbatches in (1, 4, 7)] == [3, 6, 9]
