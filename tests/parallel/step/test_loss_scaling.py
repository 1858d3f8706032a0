"""Loss scaling: exact where nothing overflows, one decision for all devices where something does, kept in the state."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import Model, Precision, build_step, census, lay_out
from spmdkit.parallel.step.loss_scaling import LossScale, next_loss_scale
from support import toy
from support.rows import batches, first_params, model, optimizer, row_named

ROWS = ("zero2-size4-accumulate", "transformer-pipe2-fsdp2-tensor2", "fsdp-prefetch-ring-full", "zero1-mlp")
BY_GROUPS = {"data": {"size": 2, "local_steps": 2}, "fsdp": {"size": 2, "floor_bytes": 0}}
COMPRESSED = {"data": {"size": 2, "compress": "int8"}, "fsdp": {"size": 2, "floor_bytes": 0}}


def trained(own, strategy, given, params, dtype="float64", steps=2, **options):
    """The step, its last state and all metrics; AdamW that leaves gradients in its state."""
    precision = Precision(params=dtype, compute=dtype, reduce=dtype, loss_scale=options.pop("loss_scale"))
    step = toy.build(strategy, optimizer(), own, clip_norm=0.5, precision=precision, **options)
    state, found = step.init(0, params), []
    for batch in given[:steps]:
        state, metrics = step(state, batch)
        found.append(jax.device_get(metrics))
    return step, jax.device_get(state), found


def assert_same_bits(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.long_cases(*ROWS[:3])
@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_power_of_two_changes_no_bit(name, float64):
    row = row_named(name)
    own, given, params = model(row.kind, row.layers), batches(row.kind == "mlp"), first_params(row.kind, row.layers)
    shared = own, row.strategy, given, params
    options = {"accumulate": row.accumulate, "remat": row.remat}
    _, plain, metrics = trained(*shared, loss_scale="none", **options)
    step, scaled, scaled_metrics = trained(*shared, loss_scale="dynamic", **options)
    assert_same_bits(scaled._replace(loss_scale=()), plain)
    assert_same_bits([each._replace(loss_scale=()) for each in scaled_metrics], metrics)
    assert (float(scaled.loss_scale.scale), int(scaled.loss_scale.good_steps)) == (2.0**15, 2)
    abstract = toy.abstract(given[0])
    assert census(step.compile(abstract).as_text(), step.plan.mesh) == step.cost(abstract)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [BY_GROUPS, COMPRESSED], ids=["local_steps", "compressed"])
def test_nor_does_it_over_slow_links(strategy):
    shared = toy.BLOCK_MODEL, strategy, [toy.batch(seed) for seed in range(2)], toy.first_params()
    _, plain, metrics = trained(*shared, "float32", loss_scale="none")
    _, scaled, scaled_metrics = trained(*shared, "float32", loss_scale="dynamic")
    assert_same_bits(scaled._replace(loss_scale=()), plain)
    assert_same_bits([each._replace(loss_scale=()) for each in scaled_metrics], metrics)


TINY = 1e-9
HALF = {"compute": "float16"}


def init(key):
    return {"w": jnp.full(16, 0.5), "b": jnp.zeros(3)}


def loss(params, batch, key):
    """The gradient that reaches the parameters in float16 is TINY times an input: 0, unless the loss is scaled."""
    found = (batch["inputs"][:, None] * params["w"][None]).sum(axis=1).astype(jnp.float32) + params["b"].sum()
    return TINY * (found * batch["weights"]).sum(), batch["weights"].sum()


TINY_MODEL = Model(init=init, loss=loss, name="tiny")
FSDP = {"fsdp": {"size": 8, "floor_bytes": 0}}


@cache
def step_of(strategy="fsdp", optimizer=None, **precision):
    """A step of the tiny model on 8 devices."""
    chosen = {"fsdp": FSDP, "data": {"data": 8}, "zero": {"data": {"size": 8, "zero": 2}}}[strategy]
    dtypes = Precision(**{**HALF, **precision})
    layouts = lay_out(TINY_MODEL, chosen, indivisible="replicate", precision=dtypes)
    return build_step(TINY_MODEL, optimizer or optax.adam(0.125), layouts, precision=dtypes)


def rows(device=None, value=0.0):
    """A row for each device, one of them with an input of its own."""
    inputs = np.ones(8, np.float32)
    if device is not None:
        inputs[device] = value
    return {"inputs": inputs, "weights": np.ones(8, np.float32)}


def test_underflowing_gradients_train_with_a_scale():
    for scale, moved in (("none", 0.0), ("auto", -0.125)):
        step = step_of(loss_scale=scale, optimizer=optax.sgd(0.125 / TINY))
        state, metrics = step(step.init(0), rows())
        np.testing.assert_allclose(state.params["w"] - 0.5, moved, rtol=0.01)  # rounded in float16
        assert float(metrics.loss) == pytest.approx(8 * TINY, rel=1e-3)  # not scaled, whatever the scale


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("data", marks=pytest.mark.slow), "zero"])
def test_one_device_of_eight_leaves_the_update_out_on_all(strategy):
    step = step_of(strategy)
    state, _ = step(step.init(0), rows())
    before = jax.device_get(state)
    after, metrics = step(state, rows(5, np.inf))
    assert not np.isfinite(float(metrics.grad_norm))
    assert float(metrics.loss_scale) == 2.0**15
    assert (int(after.step), float(after.loss_scale.scale), int(after.loss_scale.good_steps)) == (2, 2.0**14, 0)
    assert {float(shard.data) for shard in after.loss_scale.scale.addressable_shards} == {2.0**14}
    assert_same_bits(jax.device_get((after.params, after.opt_state)), (before.params, before.opt_state))
    again, metrics = step(after, rows())
    assert float(metrics.loss_scale) == 2.0**14
    assert (np.asarray(again.params["w"]) != before.params["w"]).all()


def test_the_scale_grows_after_so_many_updates_in_a_row():
    step = step_of(loss_scale_interval=2, loss_scale_initial=4.0)
    state, scales = step.init(0), []
    for bad in (False, False, False, True, False, False, False):
        state, _ = step(state, rows(0, np.nan) if bad else rows())
        scales.append(float(state.loss_scale.scale))
    assert scales == [4, 8, 8, 4, 4, 8, 8]


def test_the_scale_stays_within_bounds():
    for finite, bound in ((True, 2.0**24), (False, 2.0**-24)):
        state = LossScale(jnp.float32(1), jnp.int32(0))
        for _ in range(30):
            state = next_loss_scale(state, jnp.bool_(finite), 1)
        assert float(state.scale) == bound


@pytest.mark.parametrize(
    "strategy", [{"data": {"size": 2, "local_steps": 2}}, {"data": {"size": 8, "compress": "int8"}}]
)
def test_skipped_updates_keep_errors_and_copies(strategy):
    """The copies of a group whose own gradients were finite, and what compression owes."""
    step = toy.build(strategy, optax.adam(0.125), TINY_MODEL, precision=Precision(compute="float16"))
    state, _ = step(step.init(0), rows())
    state, _ = step(state, rows())
    before = jax.device_get(state)
    after, _ = step(state, rows(7, np.inf))
    assert_same_bits(jax.device_get(after.extra), before.extra)
    assert_same_bits(jax.device_get((after.params, after.opt_state)), (before.params, before.opt_state))
    assert float(after.loss_scale.scale) == 2.0**14


def test_gradients_are_asked_for_without_the_scale():
    step = step_of()
    gradients, metrics = step.gradients(step.init(0), rows())
    np.testing.assert_allclose(gradients["w"], TINY, rtol=0.01)
    assert float(metrics.grad_norm) == pytest.approx(TINY * (16 + 3) ** 0.5, rel=0.01)


def test_unscaled_training_has_no_scale_state():
    for precision in (Precision(), Precision(compute="bfloat16"), Precision(params="float16", compute="float16")):
        assert precision.scaling == "none"
    step = step_of(loss_scale="none")
    assert step.abstract_state().loss_scale == ()
    assert step.init(0).loss_scale == ()
    assert Precision(compute="float16").scaling == "dynamic"


def test_rejects_a_scale_for_parameters_in_float16():
    with pytest.raises(UserError, match=r"loss_scale=dynamic with precision\.params=float16: .* Set"):
        Precision(**HALF, loss_scale="dynamic", params="float16")


def test_sums_in_float16_come_down_to_what_it_holds():
    """Until gradients are divided, they are sums over all rows: 400,000 here, and float16 ends at 65,504."""

    def loss(params, batch, key):
        return (batch["weights"] * params["scale"]).sum(), batch["weights"].sum()

    own = Model(init=lambda key: {"scale": jnp.ones(())}, loss=loss)
    batch = {"weights": np.full(8, 50_000.0, np.float32)}
    step = toy.build({"data": 2}, optax.sgd(0.5), own, precision=Precision(reduce="float16"))
    state = step.init(0)
    for _ in range(22):
        state, metrics = step(state, batch)
        assert np.isfinite(float(state.params["scale"]))
    assert float(metrics.loss_scale) < 65_504 / batch["weights"].sum()
    assert float(metrics.grad_norm) == pytest.approx(1.0, rel=1e-3)
    assert float(state.params["scale"]) < 1
