"""Where the blocks of a model live, and their order in storage."""

import pytest
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.stages import assign


def stages(num_blocks, name="1f1b", size=2, layers=()):
    return assign(num_blocks, make_schedule(name, size, 2 * size), layers)


@pytest.mark.parametrize(
    ("arguments", "order"),
    [
        ((4, "1f1b"), [0, 1, 2, 3]),
        ((5, "1f1b"), [0, 1, 2, 3, 4, -1]),  # the first stages take what is left over
        ((6, "1f1b", 4), [0, 1, 2, 3, 4, -1, 5, -1]),
        ((4, "1f1b", 2, (1, 3)), [0, -1, -1, 1, 2, 3]),
        ((3, "1f1b", 2, (3, 0)), [0, 1, 2, -1, -1, -1]),  # a last stage that has the head alone
        ((8, "interleaved_1f1b"), [0, 1, 4, 5, 2, 3, 6, 7]),
        ((5, "interleaved_1f1b"), [0, 1, 3, -1, 2, -1, 4, -1]),
        ((4, "zbv"), [0, 3, 1, 2]),  # down the stages and up again
        ((5, "zbv"), [0, 1, 4, -1, 2, -1, 3, -1]),
    ],
)
def test_blocks_are_stored_stage_by_stage(arguments, order):
    made = stages(*arguments)
    assert made.order.tolist() == order
    assert made.num_blocks == arguments[0]
    assert made.is_natural == (order == list(range(arguments[0])))


def test_counts_and_starts_tell_each_chunk_its_blocks():
    made = stages(5, "zbv")
    assert made.counts == ((2, 1), (1, 1))  # virtual stages 0 and 3, 1 and 2
    assert made.starts == ((0, 4), (2, 3))
    assert made.slots == 2


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ((3, "1f1b", 4), ["model.layers=3", "4 stages", "3 < 4", "strategy.pipe.size"]),
        ((3, "zbv"), ["2 stages x 2 chunks = 4 virtual stages", "model.layers to 4", "strategy.pipe.virtual"]),
        ((4, "zbv", 2, (1, 1, 2)), ["names 3 virtual stages", "Give 4 numbers"]),
        ((4, "1f1b", 2, (1, 2)), ["strategy.pipe.layers=[1, 2]", "2 stages with 3 layers", "model.layers=4"]),
        ((4, "1f1b", 2, (1, 1, 2)), ["names 3 stages", "Give 2 numbers"]),
        ((4, "1f1b", 2, (5, -1)), ["none below 0"]),
    ],
)
def test_rejects_blocks_that_cannot_be_split(arguments, messages):
    with pytest.raises(ValueError) as error:
        stages(*arguments)
    for message in messages:
        assert message in str(error.value)
