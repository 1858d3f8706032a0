"""What a stage makes goes to its neighbours, and lands where the timetable says."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax import lax
from jax.sharding import PartitionSpec
from spmdkit.parallel.executor.message import Message, exchange, spent
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.stages import assign
from spmdkit.parallel.schedule.table import Kind
from spmdkit.parallel.schedule.timetable import Entry, make_timetable

STAGES, SLOTS = 3, 5
BELOW, ABOVE, SELF = 1, 2, 3
"""The slots that a test puts what arrives into."""


@cache
def exchanged(name, kind, fill):
    """The inboxes of all stages after a tick in which stage s made 10 + s, and -s where it has no gradient."""
    schedule = make_schedule(name, STAGES, STAGES)
    timetable = make_timetable(schedule, assign(2 * STAGES, schedule, ()))

    def run():
        stage = lax.axis_index("pipe")
        entry = Entry(**dict.fromkeys(Entry._fields, stage * 0))
        entry = entry._replace(kind=stage * 0 + kind, from_below=stage * 0 + BELOW, from_above=stage * 0 + ABOVE)
        entry = entry._replace(from_self=stage * 0 + SELF)
        inbox = Message([jnp.zeros((SLOTS, 1)) + 0.0 * stage], [jnp.zeros((SLOTS,), jnp.int32) + 0 * stage])
        made = Message([jnp.full((1,), 10.0) + stage], [-stage])
        inbox = exchange(timetable, entry, inbox, made, fill)
        return inbox[0][0][None, :, 0], inbox[1][0][None]

    spec = PartitionSpec("pipe")
    mapped = jax.shard_map(run, mesh=toy.mesh(pipe=STAGES).backend_mesh, in_specs=(), out_specs=(spec, spec))
    return [np.asarray(leaf).tolist() for leaf in jax.jit(mapped)()]


def test_both_neighbours_get_what_was_made():
    gradients, others = exchanged("1f1b", Kind.FORWARD, None)
    assert [row[BELOW] for row in gradients] == [0, 10, 11]
    assert [row[ABOVE] for row in gradients] == [11, 12, 0]
    assert [row[SELF] for row in gradients] == [10, 11, 12]
    assert [row[BELOW] for row in others] == [0, 0, -1]
    assert [row[0] for row in gradients] == [0, 0, 0], "other slots stay"


def test_only_gradients_go_down_where_activations_never_do():
    assert [row[ABOVE] for row in exchanged("1f1b", Kind.FORWARD, None)[1]] == [0, 0, 0]
    assert [row[ABOVE] for row in exchanged("zbv", Kind.FORWARD, None)[1]] == [-1, -2, 0]


def test_round_the_stages_the_last_sends_to_the_first():
    gradients, _ = exchanged("interleaved_1f1b", Kind.FORWARD, None)
    assert [row[BELOW] for row in gradients] == [12, 10, 11]
    assert [row[ABOVE] for row in gradients] == [11, 12, 10]


@pytest.mark.parametrize(
    ("kind", "sent"),
    [(Kind.FORWARD, [0, 10, 11]), (Kind.BACKWARD_INPUT, [0, 10, 11]), (Kind.BACKWARD_WEIGHT, [0, 7, 7])],
)
def test_what_nobody_needs_may_be_filled(kind, sent):
    assert [row[BELOW] for row in exchanged("1f1b", kind, 7.0)[0]] == sent


def test_a_message_that_is_spent_is_zeros():
    left = spent(Message([jnp.ones(2)], [jnp.ones(1, jnp.int32)]))
    assert [leaf.tolist() for leaf in jax.tree.leaves(left)] == [[0, 0], [0]]
