"""Local steps: each group trains alone, all meet every H steps; what that equals, moves, keeps and refuses."""

from functools import cache, partial
from itertools import pairwise

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from spmdkit.checkpoints.manager import CheckpointError, Checkpoints
from spmdkit.layouts.problems import LayoutError
from spmdkit.models import TransformerConfig, transformer
from spmdkit.parallel import DataParallelConfig, census, verify
from spmdkit.parallel.collectives import StepCounts
from spmdkit.parallel.diloco import cost, outer_step
from support import toy

FSDP = {"size": 2, "floor_bytes": 1024}
ADAMW = optax.adamw(1e-2)
ROUND = {"data": {"size": 2, "local_steps": 3}, "fsdp": FSDP}


def in_float64(strategy, model=toy.BLOCK_MODEL):
    return toy.build(strategy, ADAMW, model, precision=toy.FLOAT64, clip_norm=0.5)


def train(step, steps, state=None, batch=toy.batch, model=toy.BLOCK_MODEL):
    state = step.init(0, params=toy.first_params(model)) if state is None else state
    metrics = []
    for index in range(int(state.step), steps):
        state, latest = step(state, batch(index))
        metrics.append(latest)
    return state, metrics


def error(tree, reference):
    return max(jax.tree.leaves(jax.tree.map(toy.relative, tree, reference)))


def over_data(lines):
    return [line for line in lines if "data" in line.axes]


@pytest.fixture(scope="module")
def ours():
    """Two rounds of three steps, in float32."""
    step = toy.build(ROUND, ADAMW, clip_norm=0.5, accumulate=2)
    compiled = step.compile(toy.abstract(toy.batch(0)))
    states = [jax.tree.map(np.asarray, step.init(0))]
    state = step.init(0)
    for index in range(6):
        state, _ = step(state, toy.batch(index))
        states.append(jax.tree.map(np.asarray, state))
    return step, compiled, states


@pytest.mark.slow
def test_every_group_is_a_run_of_its_own_and_their_mean_moves_the_shared(float64):
    """Algorithm 1 of DiLoCo, written out on one device for each group."""
    rate, momentum, every = 0.7, 0.9, 2
    strategy = {"data": {"size": 2, "local_steps": every}, "fsdp": FSDP}
    state, metrics = train(in_float64(strategy), 2 * every)
    one = in_float64({"data": {"size": 1}})
    halves = [slice(None, toy.ROWS // 2), slice(toy.ROWS // 2, None)]
    start = partial(one.init, 0, params=toy.first_params())
    shared = jax.tree.map(np.asarray, start().params)
    place = partial(jax.device_put, device=one.plan.table.shardings())
    velocity = jax.tree.map(np.zeros_like, shared)
    groups, losses, norms = [start(), start()], [], []
    for index in range(2 * every):
        rows = [{name: leaf[half] for name, leaf in toy.batch(index).items()} for half in halves]
        results = [one(group, batch) for group, batch in zip(groups, rows, strict=True)]
        groups = [group for group, _ in results]
        losses.append(sum(m.loss * m.weight for _, m in results) / sum(m.weight for _, m in results))
        norms.append(np.mean([m.grad_norm for _, m in results]))
        if (index + 1) % every == 0:
            away = jax.tree.map(lambda w, *v: w - sum(map(np.asarray, v)) / 2, shared, *(g.params for g in groups))
            velocity = jax.tree.map(lambda old, new: momentum * old + new, velocity, away)
            shared = jax.tree.map(lambda w, a, v: w - rate * (a + momentum * v), shared, away, velocity)
            groups = [group._replace(params=place(shared)) for group in groups]
    assert error(state.params, shared) < 1e-9
    assert [float(each.loss) for each in metrics] == pytest.approx([float(loss) for loss in losses], rel=1e-9)
    assert [float(each.grad_norm) for each in metrics] == pytest.approx(norms, rel=1e-9)
    assert [float(each.weight) for each in metrics] == [toy.batch(n)["weights"].sum() for n in range(2 * every)]


MODEL = transformer(TransformerConfig(vocabulary=32, length=8, layers=2, width=16, heads=4, kv_heads=2, mlp_width=32))
GROUPS = {"data": {"size": 2, "local_steps": 2}}


@cache
def groups_of_one():
    """Three steps of two groups of one device."""
    return train(in_float64(GROUPS, MODEL), 3, model=MODEL)


@pytest.mark.long_cases("context x tensor", "fsdp x tensor", "pipe x fsdp")
@pytest.mark.slow
@pytest.mark.parametrize(
    "inside",
    [
        {"fsdp": FSDP, "tensor": {"size": 2}},
        {"context": {"size": 2}, "tensor": {"size": 2}},
        {"pipe": {"size": 2, "microbatches": 2}, "fsdp": FSDP},
    ],
    ids=lambda inside: " x ".join(inside),
)
def test_axes_inside_a_group_do_not_change_results(float64, inside):
    """A group of four devices trains as a group of one: the same copies, shared parameters and losses."""
    step = in_float64({**GROUPS, **inside}, MODEL)
    batch = toy.abstract(toy.batch(0))
    found = census(step.compile(batch).as_text(), step.plan.mesh)
    assert over_data(found) == over_data(step.cost(batch))
    ours, metrics = train(step, 3, model=MODEL)
    reference, expected = groups_of_one()
    assert error(ours.params, reference.params) < 1e-9
    assert error(ours.extra.copies, reference.extra.copies) < 1e-9
    assert [float(each.loss) for each in metrics] == pytest.approx([float(each.loss) for each in expected], rel=1e-9)


def test_shared_parameters_move_when_a_round_ends_and_at_no_other_step(ours):
    _, _, states = ours
    for before, after in pairwise(states):
        meets = int(after.step) % 3 == 0
        assert (error(after.params, before.params) > 0) == meets
        first, second = (jax.tree.map(lambda leaf, g=g: leaf[g], after.extra.copies) for g in (0, 1))
        assert (error(first, second) == 0) == meets
        assert (error(first, after.params) == 0) == meets


def test_shared_parameters_move_by_nesterov_momentum():
    plan = toy.plan({"data": {"size": 2, "local_steps": 3, "outer_learning_rate": 0.5, "outer_momentum": 0.75}})
    split, whole = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        partial(outer_step, step=np.int32(6), finite=np.bool_(True), plan=plan),
        **{"mesh": plan.mesh.backend_mesh, "in_specs": (whole, split, whole), "out_specs": (whole, split, whole)},
    )
    shared, copies, momentum = (np.array(x, np.float32) for x in ([[4, 8]], [[1, 8], [5, 2]], [[2, -2]]))
    away = shared - copies.mean(axis=0)[None]
    velocity = 0.75 * momentum + away
    moved = shared - 0.5 * (away + 0.75 * velocity)
    for found, expected in zip(
        jax.jit(mapped)(shared, copies, momentum), (moved, [*moved, *moved], velocity), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_frozen_parameters_are_not_exchanged():
    plan = toy.plan(ROUND, frozen=frozenset({"blocks/up"}))
    rows = {row.path: row.elements_per_device for row in plan.table.rows}
    *_, line = cost(plan, StepCounts(calls={}), "cpu")
    assert line.bytes == 4 * (sum(rows.values()) - rows["blocks/up"])


def test_what_crosses_data_is_metrics_and_once_a_round_the_parameters(ours):
    step, compiled, _ = ours
    lines = census(compiled.as_text(), step.plan.mesh)
    assert lines == step.cost()
    shard = sum(row.bytes_per_device for row in step.plan.table.rows)
    assert [(line.kind, line.axes, line.count, line.bytes) for line in over_data(lines)] == [
        ("all-reduce", ("data",), 2, shard + 12)
    ]


def test_the_exchange_is_inside_a_conditional(ours):
    """Steps that end no round run no large collective: it is in a branch, beside an empty one."""
    step, compiled, _ = ours
    row = step.plan.table.row("blocks/up")
    shard = f"f32[{','.join(map(str, row.layout.shard_shape(row.shape)))}]"
    branches, entry = compiled.as_text().split("\nENTRY ")

    def exchanges(text):
        return sum(" all-reduce(" in line and shard in line for line in text.splitlines())

    assert (exchanges(branches), exchanges(entry)) == (1, 0)
    assert " conditional(" in entry


def test_copies_are_laid_out_over_data(ours):
    step, _, _ = ours
    state = step.abstract_state()
    for copy, shared, momentum in zip(
        *map(jax.tree.leaves, (state.extra.copies, state.params, state.extra.momentum)), strict=True
    ):
        assert copy.sharding.shard_shape(copy.shape) == (1, *shared.sharding.shard_shape(shared.shape))
        assert momentum.sharding == shared.sharding
    counts = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (2,)]
    assert counts, "each group counts its own steps"


@pytest.mark.slow
def test_restored_round_continues_bitwise(ours, tmp_path):
    step, _, states = ours
    state, _ = train(step, 4, step.init(0))  # in the middle of a round
    with Checkpoints(tmp_path, keep=1, abstract_state=step.abstract_state()) as checkpoints:
        checkpoints.save(4, state)
        checkpoints.wait()
        restored = checkpoints.restore(4)
    after, _ = train(step, 6, restored)
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.tree.map(np.asarray, after), states[6]))
    fewer = toy.build({"data": {"size": 4, "local_steps": 3}, "fsdp": FSDP}, ADAMW)
    with (
        Checkpoints(tmp_path, keep=1, abstract_state=fewer.abstract_state()) as checkpoints,
        pytest.raises(CheckpointError, match=r"(?s)extra/copies/blocks/up: float32\[2,.*each group or device"),
    ):
        checkpoints.restore(4)


def test_parameters_split_over_data_have_no_copies():
    with pytest.raises(LayoutError, match=r"embed/table .*strategy.data.local_steps=2.*Use fsdp instead"):
        toy.plan({"data": {"size": 2, "local_steps": 2}}, rules={"embed/table": ("data", None)})


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"local_steps": 2, "zero": 1}, "zero=1 and local_steps=2"),
        ({"local_steps": 2, "compress": "int8"}, "compress=int8 and local_steps=2"),
        ({"compress": "int8", "zero": 2}, "zero=2 and compress=int8"),
    ],
)
def test_rejects_options_that_do_not_combine(options, names):
    with pytest.raises(ValueError, match=f"{names} do not combine"):
        DataParallelConfig(size=2, **options)


@pytest.mark.parametrize(("option", "value", "off"), [("local_steps", 2, 0), ("compress", "int8", "none")])
def test_verify_reports_that_training_differs(option, value, off):
    message = rf"strategy.data.{option}={value} does not train like one device.* strategy.data.{option}={off}"
    with pytest.raises(ValueError, match=message):
        verify(toy.BLOCK_MODEL, {"data": {"size": 2, option: value}}, [toy.batch(0)], devices=toy.devices(2))
