"""What can be wrong with a table is told."""

import re
from dataclasses import replace

import pytest
from schedule_text import TWO, parse
from spmdkit.parallel.schedule.table import Action, Kind, Schedule, check


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
