"""What can be wrong with a table is told; what is right is timed and weighed as by hand."""

import re
from dataclasses import replace

import pytest
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.csv_file import csv_text, read_schedule
from spmdkit.parallel.schedule.table import Action, Kind, Schedule, check
from spmdkit.parallel.schedule.timing import (
    live_activations,
    measure,
    peak_activations,
    peak_inputs,
    tick_lengths,
)

# two stages, two microbatches, GPipe's order; a gradient is passed on before its W
TWO = """
F0,F1,,B0,W0,B1,W1
,F0,B0,F1,B1,W0,W1
"""


def parse(text: str, **fields) -> Schedule:
    """A table as it is written, unchecked; short lines are padded."""
    kinds = dict(zip("FRBW", list(Kind)[1:], strict=True))
    cells = [line.split(",") for line in text.split()]
    ticks = max(map(len, cells))

    def action(cell: str) -> Action | None:
        number, _, chunk = cell[1:].partition(".")
        return Action(kinds[cell[0]], int(number), int(chunk or 0)) if cell else None

    by_stage = tuple(tuple(map(action, line + [""] * (ticks - len(line)))) for line in cells)
    fields = {"name": "mine", "stages": len(by_stage), "microbatches": 2, **fields}
    return Schedule(by_stage=by_stage, **fields)


def problems(schedule: Schedule) -> list[str]:
    with pytest.raises(ValueError) as caught:
        check(schedule)
    heading, *lines = str(caught.value).splitlines()
    assert re.fullmatch(rf"{len(lines)} problems? in schedule mine:", heading)
    return [line.strip() for line in lines]


def test_a_right_table_passes():
    check(parse(TWO))


@pytest.mark.parametrize(
    ("placement", "chunks", "expected"),
    [("loop", 1, [[0], [1], [2]]), ("loop", 3, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]), ("v", 2, [[0, 5], [1, 4], [2, 3]])],
)
def test_virtual_stages(placement, chunks, expected):
    schedule = Schedule(name="", stages=3, microbatches=1, chunks=chunks, placement=placement, by_stage=((),) * 3)
    assert [[schedule.virtual_stage(stage, chunk) for chunk in range(chunks)] for stage in range(3)] == expected
    homes = [schedule.home(virtual_stage) for virtual_stage in range(schedule.num_virtual_stages)]
    assert [schedule.virtual_stage(*home) for home in homes] == list(range(3 * chunks))


def test_actions_are_written_as_in_csv():
    assert str(Action(Kind.BACKWARD_INPUT, 3)) == "B3"
    assert str(Action(Kind.RECOMPUTE, 12, 1)) == "R12.1"


def test_missing_and_repeated_actions():
    assert problems(parse(TWO.replace("W0,B1,W1\n", "W0,B1,B1\n"))) == [
        "stage 0, tick 6: B1 is there twice; it was run at tick 5",
        "stage 0: W1 is missing",
    ]


def test_numbers_out_of_range():
    wrong = parse(TWO.replace(",F0,B0,F1", "F2,F0,B0,F1.1"))
    assert problems(wrong) == [
        "stage 1, tick 0: F2 is of microbatch 2, but they are 0 to 1",
        "stage 1, tick 3: F1.1 is of chunk 1, but they are 0 alone",
        "stage 1: F1 is missing",
    ]


def test_idle_is_no_action():
    first, second = parse(TWO).by_stage
    wrong = replace(parse(TWO), by_stage=(first, (Action(Kind.IDLE, 0), *second[1:])))
    assert len(problems(wrong)) == 1
    assert "None stands for an idle tick" in problems(wrong)[0]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("F0,F1,,B0,W0,B1,W1\nF0,,B0,F1,B1,W0,W1", "stage 1, tick 0: F0 needs F0 of stage 0 at an earlier tick"),
        ("F0,F1,B0,W0,,B1,W1\n,F0,B0,F1,B1,W0,W1", "stage 0, tick 2: B0 needs B0 of stage 1 at an earlier tick"),
        ("F0,F1,,B0,W0,B1,W1\n,B0,F0,F1,B1,W0,W1", "stage 1, tick 1: B0 needs F0 at an earlier tick"),
        ("F0,F1,,W0,B0,B1,W1\n,F0,B0,F1,B1,W0,W1", "stage 0, tick 3: W0 needs B0 at an earlier tick"),
        ("F0,F1,,B0,R0,W0,B1,W1\n,F0,B0,F1,B1,W0,W1", "stage 0, tick 3: B0 needs R0 at an earlier tick"),
        ("F0,F1,,B0,W0,B1,W1\nR0,F0,B0,F1,B1,W0,W1", "stage 1, tick 0: R0 needs F0 at an earlier tick"),
    ],
)
def test_what_is_too_early(table, problem):
    found = problems(parse(table))
    assert len(found) == 1
    assert found[0].startswith(problem)
    assert re.search(r", but that is at tick \d+$", found[0])


def test_a_joint_backward_passes_its_gradient_on_after_its_weights():
    assert problems(parse(TWO, joint=True)) == [
        "stage 0, tick 3: B0 needs W0 of stage 1 at an earlier tick, but that is at tick 5",
        "stage 0, tick 5: B1 needs W1 of stage 1 at an earlier tick, but that is at tick 6",
    ]


def test_shapes():
    first, second = parse(TWO).by_stage
    uneven = replace(parse(TWO), by_stage=(first, second[:-1]))
    assert problems(uneven) == ["stage 1: 6 ticks, but others have 7; fill up with None"]
    assert problems(parse(TWO, stages=3)) == ["stages=3, but by_stage has the actions of 2; give those of each"]
    assert problems(parse(TWO, placement="v")) == [
        "placement v goes down the stages and up again, with 2 chunks on each, not 1"
    ]
    assert problems(parse(TWO, placement="w", microbatches=0)) == [
        "microbatches=0, but a schedule has at least 1",
        "placement 'w' is unknown; give loop or v",
    ]


def test_very_many_problems_are_counted():
    empty = Schedule(name="mine", stages=2, microbatches=100, by_stage=((None,), (None,)))
    with pytest.raises(ValueError, match=r"^600 problems in schedule mine:\n(.*\n){50}  \.\.\. and 550 more$"):
        check(empty)


def test_time_at_unit_costs():
    assert measure(parse(TWO)) == (7, 7, 7, 1 - 12 / 14)


def test_a_tick_lasts_as_long_as_its_slowest_action():
    # ticks              F0 F1,F0 B0 B0,F1 W0,B1 B1,W0 W1,W1
    assert tick_lengths(parse(TWO), (1, 2, 3)) == [1, 1, 2, 2, 3, 3, 3]
    timing = measure(parse(TWO), (1, 2, 3))
    assert timing.time == 15
    assert timing.ideal_time == 14  # stage 1 makes the first gradient in 1 + 1 + 2; then stage 0 takes 2 + 3 + 2 + 3
    assert timing.bubble == pytest.approx(1 - 24 / 30)


def test_a_tick_in_which_all_are_idle_takes_no_time():
    idle = parse("F0,F1,,,B0,W0,B1,W1\n,F0,B0,,F1,B1,W0,W1")
    assert measure(idle).ticks == 8
    assert measure(idle).time == 7


@pytest.mark.parametrize("costs", [(1, 1), (1, 0, 1), (1, -1, 1), (1, float("nan"), 1), (1, float("inf"), 1)])
def test_costs_are_positive(costs):
    with pytest.raises(ValueError, match=r"costs .* are not three positive numbers\. Give those of forward"):
        measure(parse(TWO), costs)


def test_activations_live_to_the_end_of_their_weights():
    assert live_activations(parse(TWO), 0) == [1, 2, 2, 2, 2, 1, 1]
    assert live_activations(parse(TWO), 1) == [0, 1, 1, 2, 2, 2, 1]
    assert peak_activations(parse(TWO)) == [2, 2]
    assert peak_inputs(parse(TWO)) == [0, 0]


def test_recomputed_activations_live_from_there():
    table = parse("F0,F1,R0,B0,W0,R1,B1,W1\n,F0,B0,F1,B1,W0,W1,")
    check(table)
    assert peak_activations(table) == [1, 2]
    assert peak_inputs(table) == [2, 0]


def test_chunks_count_their_share():
    assert peak_activations(make_schedule("interleaved_1f1b", 2, 2, virtual=2)) == [2, 1.5]


def test_csv_is_read_as_it_was_written(tmp_path):
    for number, made in enumerate(
        [make_schedule("zbv", 3, 5), make_schedule("1f1b", 2, 4, recompute=True), make_schedule("gpipe", 1, 1)]
    ):
        path = tmp_path / f"{number}.csv"
        path.write_text(csv_text(made))
        assert read_schedule(path) == replace(made, name=path.name)
        assert make_schedule(str(path), made.stages, made.microbatches) == read_schedule(path)


def test_csv_of_a_spreadsheet(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes('\ufeff# by hand\r\n"F0", F1,,B0,W0,B1,W1,,\r\n,F0,B0,F1,B1,W0,W1\r\n\r\n'.encode())
    schedule = read_schedule(path)
    assert [str(action) for _, _, action in schedule.actions()][:3] == ["F0", "F1", "F0"]
    assert (schedule.stages, schedule.microbatches, schedule.chunks, schedule.joint) == (2, 2, 1, False)
    assert set(map(len, schedule.by_stage)) == {9}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("F0,X0,W0", "line 1, stage 0, tick 1: 'X0' is no action; write F, R, B or W and the microbatch"),
        ("# joint: yes\nF0,B0,W0", "line 1: joint is true or false, not 'yes'"),
        ("# placment: v\nF0,B0,W0", "Did you mean 'placement'?"),
        ("# nothing", "there is no line of actions"),
        ("F0,B0,W0,F900000000", "microbatches up to 900000000 through chunks up to 0 are more than its 4 ticks"),
        ("F0,W0,B0", "stage 0, tick 1: W0 needs B0 at an earlier tick"),
    ],
)
def test_wrong_csv(text, problem, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^1 problem in ") as caught:
        read_schedule(path)
    assert "mine.csv:\n" in str(caught.value)
    assert problem in str(caught.value)


def test_csv_of_another_size(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(csv_text(parse(TWO)))
    with pytest.raises(ValueError, match="it is a schedule for 2 stages, not for 4\n  it is a schedule for 2 micro"):
        read_schedule(path, stages=4, microbatches=8, virtual=1)
    with pytest.raises(ValueError, match=r"put R0, R1, \.\.\. in it, and leave recompute out"):
        make_schedule(str(path), 2, 2, recompute=True)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_csv_that_cannot_be_read(content, tmp_path):
    path = tmp_path / "mine.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"Cannot read the schedule .*mine.csv: (No such file|it is not text)"):
        read_schedule(path)
