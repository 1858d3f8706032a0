"""A schedule as integers: every action finds what it needs where the timetable says, and little is held."""

import itertools

import numpy as np
import pytest
from spmdkit.parallel.schedule.builders import SCHEDULES, forwards_only, make_schedule
from spmdkit.parallel.schedule.schedule_table import Kind
from spmdkit.parallel.schedule.stages import assign
from spmdkit.parallel.schedule.timetable import allocate, count_turns, make_timetable

CASES = [
    (name, stages, microbatches, recompute)
    for name, (stages, microbatches), recompute in itertools.product(
        SCHEDULES, [(2, 2), (2, 7), (4, 4), (4, 9)], [False, True]
    )
]


def timetable(name, stages, microbatches, recompute=False, blocks=11):
    schedule = make_schedule(name, stages, microbatches, recompute=recompute)
    return schedule, make_timetable(schedule, assign(blocks, schedule))


def entry(table, tick, stage):
    return type(table.entries)(*(field[tick, stage] for field in table.entries))


class Devices:
    """The stages run by hand: what lies in a slot is the name of a value."""

    def __init__(self, schedule, table):
        self.schedule, self.table = schedule, table
        self.inbox = [[None] * table.inbox for _ in range(schedule.stages)]
        self.residuals = [[None] * table.residuals for _ in range(schedule.stages)]
        self.deferred = [[None] * table.deferred for _ in range(schedule.stages)]
        self.done = []

    def act(self, stage, at):
        """Runs one action, checks what it reads, and returns what it makes."""
        kind, microbatch = Kind(at.kind), at.microbatch
        chunk = at.stored_block // self.table.blocks_per_slot
        here, last = self.schedule.virtual_stage(stage, chunk), self.schedule.num_virtual_stages - 1
        found = self.inbox[stage][at.reads]
        if kind in (Kind.FORWARD, Kind.RECOMPUTE):
            assert at.embeds == (here == 0)
            assert here == 0 or found == ("y", here - 1, microbatch)
            if kind == Kind.RECOMPUTE or not self.table.recomputes:
                self.residuals[stage][at.residuals] = (here, microbatch)
            return ("y", here, microbatch) if kind == Kind.FORWARD else None
        if kind == Kind.BACKWARD_INPUT:
            assert found == (("y", last, microbatch) if here == last else ("dx", here + 1, microbatch))
            assert self.residuals[stage][at.residuals] == (here, microbatch)
            self.deferred[stage][at.deferred] = (here, microbatch)
            return ("dx", here, microbatch)
        if kind == Kind.BACKWARD_WEIGHT:
            assert self.residuals[stage][at.residuals] == self.deferred[stage][at.deferred] == (here, microbatch)
            self.done.append((here, microbatch))
        return None

    def run(self, *, exactly=False):
        """Runs all ticks; all neighbors exchange messages or, exactly, those whose messages are read."""
        for tick in range(self.schedule.num_ticks):
            entries = [entry(self.table, tick, stage) for stage in range(self.schedule.stages)]
            made = [self.act(stage, at) for stage, at in enumerate(entries)]
            assert len({at.sends for at in entries}) == 1
            sends = self.table.sends[entries[0].sends] if exactly else self.table.neighbors
            arrived = {target: made[source] for source, target in sends.up}
            descended = {target: made[source] for source, target in sends.down}
            for stage, at in enumerate(entries):
                self.inbox[stage][at.from_below] = arrived.get(stage)
                self.inbox[stage][at.from_above] = descended.get(stage)
                self.inbox[stage][at.from_self] = made[stage]
                self.inbox[stage][-1] = None  # what nobody reads
        return self.done


@pytest.mark.parametrize(("name", "stages", "microbatches", "recompute"), CASES)
def test_every_action_finds_what_it_needs(name, stages, microbatches, recompute):
    schedule, table = timetable(name, stages, microbatches, recompute)
    for exactly in (False, True):
        done = Devices(schedule, table).run(exactly=exactly)
        assert sorted(done) == list(itertools.product(range(schedule.num_virtual_stages), range(microbatches)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_sends_each_message_once(name):
    schedule, table = timetable(name, 4, 9)
    sent = [table.sends[index] for index in table.entries.sends[:, 0]]
    between = schedule.num_virtual_stages - 1
    turn = schedule.placement == "v"  # the last stage keeps the message of its own two virtual stages
    assert sum(len(pair) for sends in sent for pair in sends) == 2 * 9 * (between - turn)


@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_schedules_hold_few_activations(name):
    """For evaluation: every virtual stage runs every microbatch once, and nothing piles up."""
    schedule, _ = timetable(name, 4, 16)
    forwards = forwards_only(schedule, 13)
    table = make_timetable(forwards, assign(11, schedule))
    Devices(forwards, table).run()
    assert sum(1 for _ in forwards.actions()) == 13 * forwards.num_virtual_stages
    assert table.inbox <= 2 * schedule.chunks + 1
    assert forwards.num_ticks <= 13 * schedule.chunks + 2 * forwards.num_virtual_stages


@pytest.mark.parametrize("microbatches", [8, 64])
def test_buffers_follow_the_peak(microbatches):
    """The slots of residuals: S of them in 1F1B and ZB-H1, however many microbatches there are; M in GPipe."""
    slots = {name: timetable(name, 4, microbatches)[1] for name in SCHEDULES}
    assert slots["1f1b"].residuals == slots["zb_h1"].residuals == 4
    assert slots["gpipe"].residuals == microbatches
    assert slots["zbv"].residuals == 2 * 4  # of half a stage each
    assert slots["1f1b"].deferred == slots["gpipe"].deferred == slots["interleaved_1f1b"].deferred == 1
    assert slots["1f1b"].inbox <= 4
    assert timetable("1f1b", 4, microbatches, recompute=True)[1].residuals == 1


def test_turns_and_storage_are_those_of_the_busiest_stage():
    _, table = timetable("1f1b", 2, 4, recompute=True, blocks=3)  # 2 blocks and 1
    turns = count_turns(table)
    assert turns["forward"] == turns["recompute"] == turns["backward_input"] == turns["backward_weight"] == 2 * 4
    assert turns["embed"] == 2 * 4  # again before backward
    assert turns["head_forward"] == turns["head_backward"] == turns["embed_backward"] == 4
    _, table = timetable("zbv", 2, 4, blocks=5)  # virtual stages of 2, 1, 1 and 1 blocks
    assert (table.blocks_per_slot, table.stored_blocks) == (2, 4)


def test_slots_are_taken_again():
    lives = [(0, 0, 3), (0, 1, 2), (0, 2, 4), (1, 0, 9), (0, 3, 5)]
    slots = allocate(lives)
    assert slots == [0, 1, 1, 0, 0]
    for (stage, start, stop), slot in zip(lives, slots, strict=True):
        others = [(a, b) for (s, a, b), other in zip(lives, slots, strict=True) if (s, other) == (stage, slot)]
        assert sum(a < stop and start < b for a, b in others) == 1
    assert allocate([]) == []
    assert np.max(allocate([(0, tick, tick + 5) for tick in range(100)])) == 4
