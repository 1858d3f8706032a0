"""How often a step runs each part of a model: of a pipeline, on the stage that runs it most."""

import toy
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.stages import assign
from spmdkit.parallel.schedule.timetable import make_timetable
from spmdkit.parallel.step.call_counts import pipeline_counts, plain_counts

MICROBATCHES, BLOCKS = 4, toy.BLOCKS


def of_pipeline(accumulate=1, *, model=toy.BLOCK_MODEL, **options):
    schedule = make_schedule("1f1b", 2, MICROBATCHES, **options)
    return pipeline_counts(model, make_timetable(schedule, assign(BLOCKS, schedule, ())), accumulate)


def test_a_device_that_runs_the_whole_model():
    calls = plain_counts(toy.BLOCK_MODEL, 4)
    assert (calls.embed, calls.embed_backward, calls.head, calls.others) == (4, 4, 4, 4)
    assert (calls.block, calls.block_backward, calls.block_weight, calls.block_again) == (12, 12, 12, 0)
    assert (calls.rows, calls.group_gradients) == (BLOCKS, {})


def test_a_model_without_blocks_calls_none():
    calls = plain_counts(toy.PLAIN_MODEL, 2)
    assert (calls.block, calls.block_backward, calls.rows, calls.others) == (0, 0, 0, 2)


def test_of_a_pipeline_the_busiest_stage_counts():
    """Three blocks on two stages: two and one."""
    calls = of_pipeline()
    assert (calls.block, calls.block_backward, calls.block_weight, calls.rows) == (2 * MICROBATCHES,) * 3 + (2,)
    assert (calls.embed, calls.embed_backward, calls.head) == (MICROBATCHES,) * 3
    assert calls.group_gradients == {"embed": MICROBATCHES, "head": MICROBATCHES}
    assert (calls.block_again, calls.others) == (0, 1)


def test_accumulating_runs_the_timetable_again():
    once, twice = of_pipeline(), of_pipeline(2)
    assert (twice.block, twice.head, twice.others) == (2 * once.block, 2 * once.head, 2)
    assert twice.rows == once.rows


def test_recomputing_runs_forward_again():
    assert of_pipeline(recompute=True).block_again == 2 * MICROBATCHES


def test_a_group_that_both_read_gets_two_gradients():
    from dataclasses import replace

    tied = replace(toy.BLOCK_MODEL, head_reads=("embed", "head"))
    assert of_pipeline(model=tied).group_gradients == {"embed": 2 * MICROBATCHES, "head": MICROBATCHES}
