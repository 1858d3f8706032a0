"""What can be wrong with a table is told."""

import re

import pytest
from spmdkit.parallel.schedule.schedule_table import Schedule, check
from support.pipelines import TWO, parse


def problems(schedule: Schedule) -> list[str]:
    with pytest.raises(ValueError) as caught:
        check(schedule)
    heading, *lines = str(caught.value).splitlines()
    assert re.fullmatch(rf"{len(lines)} problems? in schedule mine:", heading)
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("placement", "chunks", "expected"),
    [("loop", 1, [[0], [1], [2]]), ("loop", 3, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]), ("v", 2, [[0, 5], [1, 4], [2, 3]])],
)
def test_virtual_stages(placement, chunks, expected):
    schedule = Schedule(name="", stages=3, microbatches=1, chunks=chunks, placement=placement, by_stage=((),) * 3)
    assert [[schedule.virtual_stage(stage, chunk) for chunk in range(chunks)] for stage in range(3)] == expected
    homes = [schedule.home(virtual_stage) for virtual_stage in range(schedule.num_virtual_stages)]
    assert [schedule.virtual_stage(*home) for home in homes] == list(range(3 * chunks))


def test_missing_and_repeated_actions():
    assert problems(parse(TWO.replace("W0,B1,W1\n", "W0,B1,B1\n"))) == [
        "stage 0, tick 6: B1 is repeated; it already ran at tick 5",
        "stage 0: W1 is missing",
    ]


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
def test_rejects_actions_that_are_too_early(table, problem):
    found = problems(parse(table))
    assert len(found) == 1
    assert found[0].startswith(problem)
    assert re.search(r", but that is at tick \d+$", found[0])


def test_a_joint_backward_passes_its_gradient_on_after_its_weights():
    assert problems(parse(TWO, joint=True)) == [
        "stage 0, tick 3: B0 needs W0 of stage 1 at an earlier tick, but that is at tick 5",
        "stage 0, tick 5: B1 needs W1 of stage 1 at an earlier tick, but that is at tick 6",
    ]


def test_a_v_has_two_chunks():
    assert problems(parse(TWO, placement="v")) == ["placement v needs 2 chunks on each stage, got 1"]


def test_very_many_problems_are_counted():
    empty = Schedule(name="mine", stages=2, microbatches=100, by_stage=((None,), (None,)))
    with pytest.raises(ValueError, match=r"^600 problems in schedule mine:\n(.*\n){50}  \.\.\. and 550 more$"):
        check(empty)
