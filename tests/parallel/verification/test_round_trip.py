"""Saving and restoring a state: blocks in another order, changed arrays, a lost count."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import Precision, build_step, lay_out
from spmdkit.parallel.sharding import stored_order
from spmdkit.parallel.sharding.stored_order import StoredOrder
from spmdkit.parallel.step.model_order import in_model_order
from spmdkit.parallel.verification.compare import verify_step
from spmdkit.parallel.verification.round_trip import _step_on_other_mesh, in_memory, round_trip
from support import toy
from support.verification import FIVE_BLOCKS

pytestmark = pytest.mark.slow_except("test_chooses_another_mesh", "test_finds_count_lost_on_one_device")


def counting(params):
    """Counts the updates of each block, as adafactor does."""
    return {"blocks": jnp.zeros(len(params["blocks"]["up"]), jnp.int32)}


def counted(updates, state, params=None):
    return updates, jax.tree.map(lambda count: count + 1, state)


OPTIMIZER = optax.chain(optax.adamw(1e-2), optax.GradientTransformation(counting, counted))


@cache
def training():
    """A pipeline whose stages store blocks in another order, and the state after one step; compiled once."""
    layouts = lay_out(FIVE_BLOCKS, {"pipe": {"size": 2, "schedule": "zbv", "microbatches": 2}}, devices=toy.devices(2))
    step, batch = build_step(FIVE_BLOCKS, OPTIMIZER, layouts, precision=Precision()), toy.batch(0, rows=4)
    return step, batch, jax.device_get(step(step.init(0), batch)[0])


def sent(save_and_restore=None, plant=lambda: None):
    """The result for the state after one step; the mistake is planted once there is one."""
    step, batch, state = training()
    plant()
    return round_trip(step, in_memory(state, step.abstract_state()), batch, save_and_restore)


def test_state_comes_back():
    result = sent()
    assert (dict(result.restored_onto), result.differing) == ({"fsdp": 2}, ())
    assert result.next_step_rel == 0, "slots without a block restart their count, and that is no difference"
    assert result.arrays == len(jax.tree.leaves(training()[0].abstract_state()))


def test_finds_blocks_saved_in_another_order(monkeypatch):
    """Saved and restored alike: nothing is lost, but other meshes confuse the blocks."""
    right = StoredOrder.to_model

    def wrong(order, tree):
        def roll(leaf):
            return jnp.roll(leaf, 1, axis=0) if leaf.shape[:1] == (order.stages.num_blocks,) else leaf

        return jax.tree.map(roll, right(order, tree))

    monkeypatch.setattr(StoredOrder, "to_model", wrong)
    first = verify_step(training()[0], [toy.batch(0, rows=4)]).first_difference
    assert (first.what, first.where.split("/")[0]) == ("initial parameters", "blocks")
    assert "the same numbers in other places" in first.hint


def test_finds_blocks_not_put_back(monkeypatch):
    def padded(blocks, stages):
        order = stages.order
        return jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[: len(order) - stages.num_blocks] * 0]), blocks)

    result = sent(plant=lambda: monkeypatch.setattr(stored_order, "store_blocks", padded))
    assert any(line.startswith("params/blocks/up, restored from there, ") for line in result.differing)
    assert any(line.startswith("opt_state/0/0/mu/blocks/up") for line in result.differing)


def swapped(state, like):
    """A file in which two blocks of one parameter have changed places."""
    saved = in_model_order(state)
    up = np.asarray(saved.params["blocks"]["up"])[[1, 0, 2, 3, 4]]
    blocks = {**saved.params["blocks"], "up": up}
    return in_memory(saved._replace(params={**saved.params, "blocks": blocks}), like)


def uncounted(state, like):
    back = in_memory(state, like)
    return back._replace(step=jax.device_put(np.int32(0), like.step.sharding))


def rounded(state, like):
    """As a file in bfloat16 would."""
    back = in_memory(state, like)
    table = back.params["embed"]["table"].astype("bfloat16").astype("float32")
    return back._replace(params={**back.params, "embed": {"table": jax.device_put(table, back.step.sharding)}})


CHANGED = {
    swapped: "params/blocks/up, restored onto fsdp 2, has the same rows of dim 0 in another order: [1, 0, 2, 3, 4]",
    uncounted: "step, restored onto fsdp 2, ",
    rounded: "params/embed/table, restored onto fsdp 2, differs in ",
}


@pytest.mark.parametrize("planted", CHANGED, ids=lambda planted: planted.__name__)
def test_finds_changed_arrays(planted):
    result = sent(planted)
    assert any(each.startswith(CHANGED[planted]) for each in result.differing)
    assert result.next_step_rel == float("inf")


def test_finds_count_lost_on_one_device():
    step = toy.build({"data": 1})
    state = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), step.abstract_state())
    first, _ = round_trip(step, state, toy.batch(0), uncounted).differing
    assert first == "step, restored onto 1 device, differs in 1 of 1 numbers"


@pytest.mark.parametrize(
    ("strategy", "other"),
    [({"data": 2}, {"fsdp": 2}), ({"fsdp": 2}, {"data": 2}), ({"data": 2, "fsdp": 2}, {"fsdp": 4}), ({"data": 1}, {})],
)
def test_chooses_another_mesh(strategy, other):
    assert dict(_step_on_other_mesh(toy.build(strategy)).plan.mesh.split_axes) == other
