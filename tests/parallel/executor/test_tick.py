"""The parts of a tick run as often as its entry says, one after another, and leave their place in XLA's text."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from spmdkit.parallel.executor.tick import Message, Tick, add, exchange, is_even, put, take
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.schedule_table import Kind
from spmdkit.parallel.schedule.stages import assign
from spmdkit.parallel.schedule.timetable import Entry, make_timetable
from support import toy

SCHEDULE = make_schedule("1f1b", 2, 2)
THREE = make_timetable(SCHEDULE, assign(6, SCHEDULE, ()))
"""Two microbatches through two stages of three blocks: each stage runs forward six times."""


def tick(kind=Kind.FORWARD, blocks=3):
    entry = Entry(**{name: jnp.int32(0) for name in Entry._fields})._replace(kind=jnp.int32(kind))
    return Tick(entry._replace(num_blocks=blocks), THREE)


@pytest.mark.parametrize("does", [0, 1])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_each_block_has_its_turn(does, blocks):
    def run(does, blocks):
        return tick(blocks=blocks).each_block("forward", does, lambda index, total: total + 10 + index, jnp.int32(0))

    assert int(jax.jit(run)(does, blocks)) == does * (10 * blocks + sum(range(blocks)))


def test_once_is_once_or_not_at_all():
    run = jax.jit(lambda does: tick().once("embed", does, lambda x: x + 1, jnp.int32(0)))
    assert [int(run(does)) for does in (0, 1)] == [0, 1]


def test_chunks_are_even_where_all_have_as_many_blocks():
    assert is_even(THREE)
    assert not is_even(make_timetable(SCHEDULE, assign(5, SCHEDULE, ())))


def test_the_kind_of_the_action_is_looked_up():
    made = tick(Kind.RECOMPUTE)
    assert int(made.does(Kind.RECOMPUTE)) == int(made.does(Kind.FORWARD, Kind.RECOMPUTE)) == 1
    assert int(made.does(Kind.BACKWARD_INPUT)) == int(made.does()) == 0


def test_each_part_needs_the_clock_of_the_one_before():
    """Else XLA might run both at the same time, and their collectives in any order."""

    def run(does, x, y):
        made = tick(blocks=2)
        made.each_block("forward", does, lambda _, x: x + 1, x)
        return made.each_block("backward_input", jnp.int32(1), lambda _, y: y + 1, y)

    jaxpr = jax.make_jaxpr(run)(jnp.int32(1), jnp.int32(0), jnp.int32(0)).jaxpr
    loops = [each for each in jaxpr.eqns if each.primitive.name == "cond" and len(each.outvars) == 2]  # and a clock
    made_by = {variable: each for each in jaxpr.eqns for variable in each.outvars}

    def comes_from(variable, wanted):
        equation = made_by.get(variable) if not hasattr(variable, "val") else None
        return equation is wanted or (
            equation is not None and any(comes_from(each, wanted) for each in equation.invars)
        )

    assert len(loops) == 2
    assert any(comes_from(variable, loops[0]) for variable in loops[1].invars)
    assert int(jax.jit(run)(1, 0, 5)) == 7


def test_a_single_slot_is_read_after_the_loops_before():
    buffers = {"one": jnp.arange(4.0).reshape(1, 4)}
    assert tick().take(buffers, jnp.int32(0))["one"].tolist() == [0, 1, 2, 3]
    many = {"two": jnp.arange(4.0).reshape(2, 2)}
    assert tick().take(many, jnp.int32(1))["two"].tolist() == [2, 3]

    def selects(buffers):
        return str(jax.make_jaxpr(lambda slot: tick().take(buffers, slot))(0)).count("select_n")

    assert selects(buffers) == selects(many) + 1


def test_slots_are_put_taken_and_added():
    buffers = {"a": jnp.zeros((2, 3)), "b": jnp.zeros((2,), jnp.int32)}
    filled = put(buffers, jnp.int32(1), {"a": jnp.ones(3), "b": jnp.int32(7)})
    assert filled["a"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert take(filled, jnp.int32(1))["b"] == 7
    assert add({"x": jnp.int32(1)}, {"x": jnp.int32(2)}) == {"x": 3}


STAGES, SLOTS = 3, 5
BELOW, ABOVE, SELF = 1, 2, 3
"""The slots that a test puts what arrives into."""


@cache
def exchanged(name):
    """The inboxes of all stages after a tick in which stage s made 10 + s, and -s where it has no gradient."""
    schedule = make_schedule(name, STAGES, STAGES)
    timetable = make_timetable(schedule, assign(2 * STAGES, schedule, ()))

    def run():
        stage = lax.axis_index("pipe")
        entry = Entry(**dict.fromkeys(Entry._fields, stage * 0))
        entry = entry._replace(from_below=stage * 0 + BELOW, from_above=stage * 0 + ABOVE)
        entry = entry._replace(from_self=stage * 0 + SELF)
        inbox = Message([jnp.zeros((SLOTS, 1)) + 0.0 * stage], [jnp.zeros((SLOTS,), jnp.int32) + 0 * stage])
        made = Message([jnp.full((1,), 10.0) + stage], [-stage])
        inbox = exchange(timetable, entry, inbox, made)
        return inbox[0][0][None, :, 0], inbox[1][0][None]

    spec = PartitionSpec("pipe")
    mapped = jax.shard_map(run, mesh=toy.mesh(pipe=STAGES).backend_mesh, in_specs=(), out_specs=(spec, spec))
    return [np.asarray(leaf).tolist() for leaf in jax.jit(mapped)()]


def test_both_neighbors_receive_the_message():
    gradients, others = exchanged("1f1b")
    assert [row[BELOW] for row in gradients] == [0, 10, 11]
    assert [row[ABOVE] for row in gradients] == [11, 12, 0]
    assert [row[SELF] for row in gradients] == [10, 11, 12]
    assert [row[BELOW] for row in others] == [0, 0, -1]
    assert [row[0] for row in gradients] == [0, 0, 0], "other slots stay"


def test_sends_only_gradients_down_without_v_placement():
    assert [row[ABOVE] for row in exchanged("1f1b")[1]] == [0, 0, 0]
    assert [row[ABOVE] for row in exchanged("zbv")[1]] == [-1, -2, 0]


def test_round_the_stages_the_last_sends_to_the_first():
    gradients, _ = exchanged("interleaved_1f1b")
    assert [row[BELOW] for row in gradients] == [12, 10, 11]
    assert [row[ABOVE] for row in gradients] == [11, 12, 10]
