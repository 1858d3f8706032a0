"""Forwards alone: each stage runs each microbatch through each of its chunks once, in order, and waits for no more."""

import pytest
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.forwards import forwards_only
from spmdkit.parallel.schedule.table import Kind


def forwards(name, stages, microbatches):
    return forwards_only(make_schedule(name, stages, 2 * stages), microbatches)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (3, 1), (3, 8)])
def test_every_microbatch_goes_through_every_virtual_stage_once(name, stages, microbatches):
    schedule = forwards(name, stages, microbatches)
    when = {
        (schedule.virtual_stage(stage, action.chunk), action.microbatch): tick
        for tick, stage, action in schedule.actions()
    }
    assert {action.kind for _, _, action in schedule.actions()} == {Kind.FORWARD}
    assert len(when) == len(list(schedule.actions())) == schedule.num_virtual_stages * microbatches
    for (virtual_stage, microbatch), tick in when.items():
        assert virtual_stage == 0 or when[virtual_stage - 1, microbatch] < tick
        assert microbatch == 0 or when[virtual_stage, microbatch - 1] < tick


@pytest.mark.parametrize("microbatches", [1, 4, 7])
def test_a_chunk_a_stage_takes_no_idle_tick_but_to_fill_and_drain(microbatches):
    schedule = forwards("1f1b", 3, microbatches)
    assert schedule.num_ticks == microbatches + 2
    assert schedule.name == "forwards of 1f1b"


def test_chunks_and_placement_are_kept():
    schedule = forwards("zbv", 2, 3)
    assert (schedule.chunks, schedule.placement, schedule.stages, schedule.microbatches) == (2, "v", 2, 3)
