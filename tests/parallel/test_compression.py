"""Compressed gradients: what rounding loses comes back, what moves is what the cost says, training is as good."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from spmdkit.layouts.problems import LayoutError
from spmdkit.parallel import Model, census
from spmdkit.parallel.compression import BLOCK, Errors, _exchange, dequantize, quantize, reduce
from spmdkit.parallel.plan import Reduced
from spmdkit.training.loop import run_steps
from spmdkit.training.steps.not_finite import Diverged
from support import toy
from support.order import unordered

FSDP = {"size": 2, "floor_bytes": 1024}
STRATEGY = {"data": {"size": 4, "compress": "int8"}, "fsdp": FSDP}
RATE = 0.5
SGD = optax.sgd(RATE)


@pytest.fixture(scope="module")
def ours():
    step = toy.build(STRATEGY, SGD, accumulate=2)
    return step, step.compile(toy.abstract(toy.batch(0)))


@pytest.mark.slow
def test_blocks_round_to_a_hundredth_of_their_largest():
    sizes = np.array([[1e-30], [1e-10], [0.0], [1.0], [1e20]], np.float32)
    values = np.random.default_rng(0).normal(size=(5, BLOCK)).astype(np.float32) * sizes
    packed = quantize(jnp.asarray(values))
    assert packed.shape == (5, BLOCK + 4)
    assert packed.dtype == jnp.int8
    back = np.asarray(dequantize(packed))
    largest = np.abs(values).max(axis=1, keepdims=True)
    assert (np.abs(back - values) <= largest / 127 / 2 * 1.0001).all()
    np.testing.assert_allclose(np.abs(back).max(axis=1, keepdims=True), largest, rtol=1e-6)


@pytest.mark.slow_cases("-inf", "inf")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_stay_in_their_block(bad):
    values = np.random.default_rng(0).normal(size=(3, BLOCK)).astype(np.float32)
    spoilt = values.copy()
    spoilt[1, 7] = bad
    back = np.asarray(dequantize(quantize(jnp.asarray(spoilt))))
    assert not np.isfinite(back[1]).any()
    expected = np.asarray(dequantize(quantize(jnp.asarray(values))))
    assert np.array_equal(back[[0, 2]], expected[[0, 2]])


def test_a_sum_lacks_only_what_is_owed_for_the_next_one():
    """Of two devices, with two rows: each sums one of them."""
    random, rows, whole = np.random.default_rng(0), PartitionSpec("data"), PartitionSpec()
    mean, owed = (random.normal(size=(4, 8)).astype(np.float32) for _ in range(2))
    owed_sum = random.normal(size=(2, 8)).astype(np.float32)
    mapped = jax.shard_map(
        partial(_exchange, axes=("data",)),
        **{"mesh": toy.mesh(data=2).backend_mesh, "in_specs": (rows, rows, rows), "out_specs": (whole, rows, rows)},
    )
    total, own_error, sum_error = jax.jit(mapped)(mean, owed, owed_sum)
    assert 0.001 < np.abs(own_error).max() < 0.05
    expected = (mean + owed - own_error).reshape(2, 2, 8).sum(axis=0) + owed_sum - sum_error
    np.testing.assert_allclose(total, expected, atol=1e-5)


def test_errors_do_not_depend_on_the_loss_scale():
    model = Model(init=lambda key: {"w": jnp.zeros(8)}, loss=lambda *_: (0.0, 1.0))
    plan = toy.plan({"data": {"size": 2, "compress": "int8"}}, model)
    random, rows, whole = np.random.default_rng(0), PartitionSpec("data"), PartitionSpec()

    def local(gradient, weight, owed, scale):
        found = reduce(Reduced({"w": gradient[0] * scale}, [weight[0], weight[0]], owed, scale), plan)
        return found.gradients["w"] / scale, found.errors

    specs = {"in_specs": (rows, rows, rows, whole), "out_specs": (whole, rows)}
    mapped = jax.jit(jax.shard_map(local, mesh=plan.mesh.backend_mesh, **specs))
    gradient, owed = (random.normal(size=shape).astype(np.float32) for shape in ((2, 8), (2, 2, BLOCK)))
    given = gradient, np.float32([1, 3]), Errors((owed,), (owed[:, :1],))
    jax.tree.map(np.testing.assert_array_equal, *(mapped(*given, np.float32(scale)) for scale in (1, 1024)))


def test_nothing_is_owed_at_first():
    owed = jax.tree.leaves(toy.build({"data": {"size": 2, "compress": "int8"}}).init(0).extra)
    assert [np.asarray(leaf).any() for leaf in owed] == [False, False]


@pytest.mark.slow
def test_a_nan_on_one_device_ends_the_run_in_its_step():
    """The gradient of one row is NaN, its loss is not: once swallowed, these parameters would never move again."""

    def loss(params, batch, key):
        rows = batch["inputs"].astype(jnp.float32).mean(axis=1)
        spoilt = jnp.sqrt(params["w"][:1] * (1 - batch["spoilt"])).sum()  # of 0: a gradient of infinity times 0
        total = (rows * (jnp.sin(params["w"] * jnp.arange(300.0)).mean() + params["small"].sum())).sum()
        return total + spoilt, rows.sum()

    model = Model(init=lambda key: {"w": jnp.ones(300), "small": jnp.zeros(3)}, loss=loss)
    step = toy.build({"data": {"size": 4, "compress": "int8"}}, SGD, model, clip_norm=1.0)

    def batches(spoilt):
        for number in range(1, 6):
            rows = np.zeros(toy.ROWS, np.float32)
            rows[5] = number == spoilt
            yield {"inputs": toy.batch(number)["inputs"], "spoilt": rows}

    reported = []
    with pytest.raises(Diverged, match=r"Step 3: the loss is -?\d+\.\d+ and the norm of the gradients nan"):
        run_steps(step, step.init(0), batches(3), log_every=1, on_progress=lambda found: reported.append(found.step))
    assert reported == [1, 2]
    state = run_steps(step, step.init(0), batches(0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state.extra)))


@pytest.mark.slow
def test_gradients_of_all_steps_sum_to_the_exact_ones_but_for_the_last_errors(ours):
    """Error feedback, telescoped: with a model whose gradient does not depend on its parameters."""

    def loss(params, batch, key):
        rows = batch["inputs"].astype(jnp.float32).mean(axis=1)
        weights = batch["weights"].sum(axis=1)
        wave = jnp.sin(jnp.arange(300.0) * 7)
        return (weights * rows * ((params["w"] * wave).sum() + params["small"].sum())).sum(), weights.sum()

    model = Model(init=lambda key: {"w": jnp.zeros(300), "small": jnp.zeros(3)}, loss=loss)
    step = toy.build({"data": {"size": 4, "compress": "int8"}}, SGD, model)
    exact = toy.build({"data": {"size": 4}}, SGD, model)
    state, reference = step.init(0), exact.init(0)
    for index in range(5):
        state, _ = step(state, toy.batch(index))
        reference, _ = exact(reference, toy.batch(index))
    sent, returned = (np.asarray(leaves[0]) for leaves in state.extra)
    owed = sent.sum(axis=0).reshape(-1) + returned.reshape(-1)
    ours = np.concatenate([np.asarray(state.params["small"]), np.asarray(state.params["w"])])
    theirs = np.concatenate([np.asarray(reference.params["small"]), np.asarray(reference.params["w"])])
    owed = np.concatenate([owed[:3], owed[BLOCK : BLOCK + 300]])
    assert np.abs(ours - theirs).max() > 1e-3  # it did round
    np.testing.assert_allclose(ours - RATE * owed, theirs, atol=2e-5)


def test_census_equals_the_cost(ours):
    step, compiled = ours
    lines = census(compiled.as_text(), step.plan.mesh)
    assert unordered(compiled.as_text()) == []
    assert lines == step.cost()
    shards = sum(row.bytes_per_device for row in step.plan.table.rows if row.layout.used_axes)
    assert shards // (4 * BLOCK) == 14  # blocks, to be dealt out to 4 devices: 16
    over_data = {line.kind: line.bytes for line in lines if line.axes == ("data",)}
    assert over_data == {"all-to-all": 16 * 260, "all-gather": 16 * 260}
    exact = [line for line in lines if line.axes == ("data", "fsdp") and line.kind == "all-reduce"]
    assert [line.bytes for line in exact] == [12]  # loss, weight and the norm


@pytest.mark.slow
def test_the_loss_is_exact_and_gradients_nearly(ours):
    step, _ = ours
    plain = toy.build({"data": {"size": 4}, "fsdp": FSDP}, SGD, accumulate=2)
    before = plain.init(0).params
    ours, metrics = step(step.init(0), toy.batch(0))
    theirs, expected = plain(plain.init(0), toy.batch(0))
    assert float(metrics.loss) == pytest.approx(float(expected.loss), rel=1e-6)
    assert float(metrics.weight) == float(expected.weight)
    assert float(metrics.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-2)
    moved = jax.tree.map(lambda after, start: np.asarray(after) - np.asarray(start), ours.params, before)
    wanted = jax.tree.map(lambda after, start: np.asarray(after) - np.asarray(start), theirs.params, before)
    errors = jax.tree.leaves(jax.tree.map(toy.relative, moved, wanted))
    assert 1e-4 < max(errors) < 2e-2
    exact, _ = step.gradients(step.init(0), toy.batch(0))
    wanted, _ = plain.gradients(plain.init(0), toy.batch(0))
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, exact, wanted))) < 1e-5


def test_copies_stay_equal(ours):
    """Every device of `data` computes the same sum to the last bit."""
    step, _ = ours
    state = step.init(0)
    for index in range(3):
        state, _ = step(state, toy.batch(index))
    for leaf in jax.tree.leaves(state.params):
        by_index = {}
        for shard in leaf.addressable_shards:
            by_index.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert all(np.array_equal(first, other) for first, *others in by_index.values() for other in others)


@pytest.mark.slow
def test_errors_are_each_devices_own(ours):
    step, _ = ours
    state = step.init(0)
    assert all(leaf.shape[0] == leaf.sharding.num_devices == 8 for leaf in jax.tree.leaves(state.extra))
    assert all(leaf.sharding.shard_shape(leaf.shape)[0] == 1 for leaf in jax.tree.leaves(state.extra))
    state, _ = step(state, toy.batch(0))
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.extra))


def test_axes_left_to_xla_are_refused():
    with pytest.raises(LayoutError, match=r"blocks/up .*strategy.data.compress=int8.*here data\."):
        toy.plan({"data": {"size": 2, "compress": "int8"}, "tensor": 2}, rules={"blocks/up": (None, None, "tensor")})
