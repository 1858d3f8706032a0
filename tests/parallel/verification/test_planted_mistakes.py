"""Each planted mistake is found, named and explained: in the strategies, the step, split work and evaluation."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from spmdkit.parallel import FSDPConfig, Model, build_step, lay_out, verify
from spmdkit.parallel import data as data_strategy
from spmdkit.parallel.executor.stage import Stage
from spmdkit.parallel.step import composition
from spmdkit.parallel.step import train_step as step_file
from spmdkit.parallel.step import update as update_file
from spmdkit.parallel.verification.compare import FLOAT64, verify_step, x64
from spmdkit.parallel.verification.result import LIGHT_BATCH
from spmdkit.runtime import verify as launch_verify
from spmdkit.training.optimizing.averaging import averaged
from support import toy
from support.verification import (
    BLOCK_MODEL,
    DROPOUT,
    MODEL,
    OPTIMIZER,
    WIDTH,
    Namespace,
    batches,
    found,
    one_device_is_compiled_once,  # noqa: F401  (a fixture of every test here)
    unchecked,
    verified,
)

pytestmark = pytest.mark.slow_except(
    "test_finds_wrong_norm", "test_finds_wrong_reported_weight", "test_finds_wrong_evaluation_sums"
)

FSDP = {"fsdp": FSDPConfig(size=4, floor_bytes=512)}


@pytest.fixture
def plant(monkeypatch):
    """Replaces a function by one that gets the original function and its arguments."""

    def replace_by(owner, name, wrong):
        right = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **options: wrong(right, *given, **options))

    return replace_by


def unsummed(leaf):
    """Sums everything but one gradient."""
    return lambda gradients, summed, scalars: ({**summed, leaf: gradients[leaf]}, scalars)


def summed_again(axis, factor=1.0):
    def wrong(gradients, summed, scalars):
        return {**summed, "scale": lax.psum(lax.pcast(summed["scale"], axis, to="varying"), axis) * factor}, scalars

    return wrong


def averaged_sum(gradients, summed, scalars):
    return {**summed, "first": summed["first"] / 2}, scalars


def weight_times_4(gradients, summed, scalars):
    return summed, [scalars[0], 4 * scalars[1], *scalars[2:]]


def scaled_alike(gradients, summed, scalars):
    """The mean and its gradients are right; the sums over several batches would not be."""
    total, weight, *others = scalars
    return jax.tree.map(lambda leaf: 2 * leaf, summed), [2 * total, 2 * weight, *(4 * each for each in others)]


def missing(axes):
    return (f"Devices along {axes} hold different values, and their sum is the reference: a missing psum over {axes}",)


FOUR_TIMES = ("It is 4 times the reference in every element.",)
COLLECTIVE = ("all-reduce over data: 1 moving 1,536 bytes predicted", "1,664 bytes found")
TWICE = ("2 times the reference.", "Their ratio, the mean loss, is correct.")
HALF = ("It is 0.5 times the reference in every element.",)
WEIGHED = ("The weight is", "4 times the reference.")
REDUCED = {
    "refused": (unsummed("first"), {}, "gradients", "first", ("JAX rejects the step", "a missing psum over data.")),
    "accepted": (unsummed("first"), {"unchecked": True}, "gradients", "first", missing("data")),
    "accepted scale": (unsummed("scale"), {"unchecked": True}, "gradients", "scale", missing("data x fsdp")),
    "doubled data": (summed_again("data"), {"strategy": {"data": 4}}, "gradients", "scale", FOUR_TIMES),
    "doubled fsdp": (summed_again("fsdp"), {"strategy": FSDP}, "gradients", "scale", FOUR_TIMES),
    "average": (averaged_sum, {}, "gradients", "first", HALF),
    "weight": (weight_times_4, {"strategy": {"data": 4}}, "loss", "", WEIGHED),
    "scaled alike": (scaled_alike, {}, "weight", "", TWICE),
    "collective": (summed_again("data", 0.5), {}, "collectives", "", COLLECTIVE),
}


@pytest.mark.parametrize("name", REDUCED)
def test_finds_wrong_sum_over_devices(name, plant, monkeypatch):
    change, given, what, where, texts = REDUCED[name]
    options = dict(given)

    def wrong(right, gradients, *rest):
        return change(gradients, *right(gradients, *rest)) if isinstance(gradients, dict) else right(gradients, *rest)

    plant(data_strategy, "reduce_gradients", wrong)
    if options.pop("unchecked", False):
        with unchecked(monkeypatch):
            result = verified(**options)
    else:
        result = verified(**options)
    found(result, what, where, *texts)
    if what == "collectives":
        assert "NOT as predicted" in str(result)
    if what == "weight":
        assert result.errors["loss"].relative < 1e-12


def times(factor):
    def wrong(right, *given, **options):
        gradients, sums = right(*given, **options)
        return jax.tree.map(lambda leaf: leaf * factor, gradients), sums

    return wrong


def mean_of_means(right, *given, **options):
    gradients, sums = right(*given, **options)
    mean = jax.tree.map(lambda leaf: leaf / sums.weight, gradients)
    return mean, sums._replace(total=sums.total / sums.weight, weight=sums.weight / sums.weight)


def test_finds_a_divisor_that_counts_light_batches_as_1(monkeypatch):
    """Batches of the usual weight do not show it."""
    monkeypatch.setattr(composition, "jnp", Namespace(jnp, where=lambda is_zero, one, weight: jnp.maximum(weight, one)))
    result = verified()
    found(result, LIGHT_BATCH, "loss", "If its weights are scaled to sum to 0.5, the loss is not")
    assert not result.errors["loss"].differs


def one_less(plan):
    return replace(plan, options=replace(plan.options, accumulate=plan.options.accumulate - 1))


def without_last(right, local, plan, params, batch, *rest):
    fewer = {name: rows[: -len(rows) // plan.options.accumulate] for name, rows in batch.items()}
    return right(local, one_less(plan), params, fewer, *rest)


def gradients_without_first(right, local, plan, params, batch, *rest):
    """Loss and weight count the first microbatch, the gradients do not."""
    _, sums = right(local, plan, params, batch, *rest)
    fewer = {name: rows[len(rows) // plan.options.accumulate :] for name, rows in batch.items()}
    return right(local, one_less(plan), params, fewer, *rest)[0], sums


def one_place_twice(right, *given, **options):
    gradients, sums = right(*given, **options)
    factor = 1 + (lax.axis_index("data") == 1)
    return gradients, sums._replace(total=sums.total * factor, weight=sums.weight * factor)


def scaled_dropout(params, batch, key):
    """Its rate, in float32, is a constant: no array of the model is computed in float32."""
    return DROPOUT.loss(params, {**batch, "inputs": batch["inputs"] / jnp.float32(1 - 0.2)}, key)


SCALED_DROPOUT = Model(init=DROPOUT.init, loss=scaled_dropout)
ACCUMULATED = {
    "mean of means": (mean_of_means, {"strategy": {"data": 4}}, "loss", "The weight is 4, and"),
    "millionths": (times(1 + 3e-6), {"model": SCALED_DROPOUT}, "gradients", "It is 1 + 3.0e-06 times the"),
    "microbatch": (without_last, {"accumulate": 2}, "loss", "The sum of the losses is"),
    "its gradients": (gradients_without_first, {"accumulate": 4}, "gradients", "It is not a multiple of the"),
    "one place": (one_place_twice, {}, "loss", "The weight is"),
}


@pytest.mark.parametrize("name", ACCUMULATED)
def test_finds_wrong_gradients_of_device(name, plant):
    wrong, options, what, text = ACCUMULATED[name]
    plant(composition, "accumulate_gradients", wrong)
    result = verified(**options)
    found(result, what, result.gradients[0].path if what == "gradients" else "", text)
    assert result.tolerance == 1e-9


def test_clipping_does_not_hide_doubled_sum_of_everything(plant, monkeypatch):
    def wrong(right, local, plan, *rest):
        gradients, sums = right(local, plan, *rest)
        return jax.tree.map(lambda leaf: lax.psum(leaf, plan.manual_axes) / 2, gradients), sums

    plant(composition, "accumulate_gradients", wrong)
    with unchecked(monkeypatch):
        result = verified(strategy={"data": 4}, clip_norm=0.01)
    first = found(result, "gradients", result.gradients[0].path, "It is 2 times the reference in every element")
    assert first.relative == pytest.approx(1)


def test_finds_shards_gathered_in_another_order(plant):
    def wrong(right, shard, axes, **options):
        whole = right(shard, axes, **options)
        return jnp.roll(whole, 1, axis=0) if whole.shape == (WIDTH, WIDTH) else whole

    plant(lax, "all_gather", wrong)
    found(verified(), "loss", "", "The sum of the losses is", "times the reference.")


def test_finds_gradient_scattered_along_wrong_dim(plant):
    def wrong(right, gradient, axes, **options):
        return right(gradient.T if gradient.shape == (WIDTH, WIDTH) else gradient, axes, **options)

    plant(lax, "psum_scatter", wrong)
    found(verified(strategy=FSDP), "gradients", "first", "It is the same numbers in other places.", "(fsdp, None)")


def test_finds_wrong_norm(plant):
    def wrong(right, gradients, *rest):
        return right({**gradients, "scale": gradients["scale"] * 2**0.5}, *rest)

    plant(composition, "global_norm", wrong)
    result = verified(clip_norm=0.1)
    found(result, "gradient norm", "", "times the reference, although every gradient is correct.")


def test_finds_clipping_by_wrong_norm(plant):
    """The reported norm is right, the one that gradients are clipped by is not."""
    plant(composition, "clip_factor", lambda right, norm, clip_norm: right(norm / 2, clip_norm))
    result = verified(clip_norm=0.1)
    found(result, "gradients", result.gradients[0].path, "It is 2 times the reference in every element.")
    assert not result.errors["gradient norm"].differs


def test_finds_missing_update(monkeypatch):
    right = optax.apply_updates
    monkeypatch.setattr(
        step_file.optax, "apply_updates", lambda params, updates: {**right(params, updates), "scale": params["scale"]}
    )
    monkeypatch.setattr("spmdkit.parallel.verification.reference.optax", Namespace(optax, apply_updates=right))
    found(verified(), "parameters", "scale", "The change of the parameter over all steps is zero.")


def test_finds_decay_applied_twice(monkeypatch):
    def wrong(params, updates):
        return jax.tree.map(lambda leaf, update: leaf + update - 1e-4 * leaf, params, updates)

    monkeypatch.setattr(update_file, "optax", Namespace(optax, apply_updates=wrong))
    result = verified()
    found(result, "parameters", result.errors["parameters"].where, "over all steps is not a multiple of the reference")


def test_finds_gradients_doubled_for_optimizer(plant):
    def wrong(right, optimizer, gradients, *rest):
        return right(optimizer, jax.tree.map(lambda leaf: 2 * leaf, gradients), *rest)

    plant(step_file, "apply_optimizer", wrong)
    result = verified(optimizer=optax.sgd(0.1, momentum=0.9))
    found(result, "parameters", result.errors["parameters"].where, "The gradients of the first step and their norm are")
    assert result.errors["optimizer's state"].where.startswith("0/trace/")


def test_finds_wrong_reported_weight(plant):
    """Only the step reports a wrong weight; its gradients, alone, report the right one."""

    def wrong(right, *given):
        state, metrics = right(*given)
        return state, metrics._replace(weight=metrics.weight * (1 + (state.step == 2)))

    plant(step_file.Step, "_step", wrong)
    found(verified(), "what a step reports", "weight of step 1", "the reported weight of step 1 is wrong")


def test_finds_wrong_count_that_changes_no_parameter_yet(plant):
    """The optimizer starts at step 1; its schedule is constant during the verified steps."""

    def wrong(right, *given):
        state = right(*given)
        return state._replace(opt_state=jax.tree.map(lambda leaf: leaf + (leaf.ndim == 0), state.opt_state))

    plant(step_file.Step, "_first_state", wrong)
    result = verified(optimizer=optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: -0.1)))
    found(result, "optimizer's state", "1/count", "which later updates start from")


def test_finds_random_numbers_of_first_step_in_all(plant):
    def wrong(right, local, params, batch, key_data, step, *rest):
        return right(local, params, batch, key_data, step * 0, *rest)

    plant(composition.DeviceStep, "gradients", wrong)
    result = verified(DROPOUT)
    found(result, "parameters", result.errors["parameters"].where, "The gradients of the first step and their norm are")
    assert result.errors["what a step reports"].differs


def test_finds_initial_parameters_that_depend_on_mesh(plant):
    plant(step_file.Step, "init", lambda right, step, seed, *params: right(step, seed + 1, *params))
    result = verified()
    found(result, "initial parameters", result.first_difference.where, "The same seed gives different parameters")


def split_block_model(size):
    """The toy with its hidden width split over `tensor`; every device returns its share of the loss."""

    def block(params, x, key):
        whole = lax.all_gather(x, "tensor", axis=1, tiled=True)
        partial = jnp.tanh((whole * params["scale"][None, None]) @ params["up"]) @ params["down"]
        return x + lax.psum_scatter(partial, "tensor", scatter_dimension=1, tiled=True)

    def own(array):
        length = array.shape[1] // size
        return lax.dynamic_slice_in_dim(array, lax.axis_index("tensor") * length, length, 1)

    def embed(groups, batch, key):
        return groups["embed"]["table"][own(batch["inputs"])]

    def head(groups, x, batch, key):
        return toy.head(groups, x, {name: own(batch[name]) for name in ("targets", "weights")}, key)

    rules = {"blocks/up": (None, None, "tensor"), "blocks/down": (None, "tensor", None)}
    return replace(BLOCK_MODEL, embed=embed, block=block, head=head, rules=rules)


TENSOR_MODEL = replace(BLOCK_MODEL, parallelize=lambda parallel: split_block_model(parallel.tensor.size))


def verified_tensor():
    given = [toy.batch(seed, rows=4) for seed in range(2)]
    return verify(TENSOR_MODEL, {"data": 2, "tensor": 2}, given, optimizer=OPTIMIZER, devices=toy.devices(4))


def test_finds_missing_sum_over_tensor(plant, monkeypatch):
    """The gradient of a parameter that every device of `tensor` holds is summed over `data` alone."""

    def wrong(right, gradients, *rest):
        summed, scalars = right(gradients, *rest)
        blocks = {**summed["blocks"], "scale": lax.psum(gradients["blocks"]["scale"], "data")}
        return {**summed, "blocks": blocks}, scalars

    plant(data_strategy, "reduce_gradients", wrong)
    with unchecked(monkeypatch):
        result = verified_tensor()
    found(result, "gradients", "blocks/scale", "Devices along tensor hold different", "a missing psum over tensor")


def test_finds_unpredicted_collectives_of_split_model():
    """The model predicts none of its own traffic; its numbers are right."""
    found(verified_tensor(), "collectives", "", "all-gather over tensor: none predicted")


def verified_pipeline():
    given = [toy.batch(seed, rows=8) for seed in range(2)]
    return verify(BLOCK_MODEL, {"pipe": {"size": 2}}, given, optimizer=OPTIMIZER, devices=toy.devices(2))


def test_finds_head_that_drops_microbatch(plant):
    """Neither loss nor weight counts it, and no gradient starts from it."""

    def wrong(right, stage, tick, groups, y):
        sums = right(stage, tick, groups, y)
        counts = (tick.entry.microbatch != 1).astype(sums.total.dtype)
        return jax.tree.map(lambda leaf: leaf * counts, sums)

    plant(Stage, "head", wrong)
    found(verified_pipeline(), "loss", "", "The weight is")


def test_finds_stage_that_drops_microbatch(plant):
    """The loss counts it, but one stage leaves it out of the gradients of its layers."""

    def wrong(right, stage, tick, *given):
        entry = tick.entry
        dropped = (entry.microbatch == 2) & (lax.axis_index("pipe") == 0)
        tick.entry = entry._replace(num_blocks=jnp.where(dropped, 0, entry.num_blocks))
        gradients = right(stage, tick, *given)
        tick.entry = entry
        return gradients

    plant(Stage, "backward_weight", wrong)
    result = verified_pipeline()
    first = found(result, "gradients", result.gradients[0].path, "It is not a multiple of the reference.")
    assert first.where.startswith("blocks/")


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("factor", [2, 1])
def test_finds_wrong_evaluation_sums(factor, plant):
    def wrong(right, *given):
        total, weight = right(*given)
        return factor * total, factor * weight + (factor == 1)

    plant(step_file.Step, "evaluate", wrong)
    found(verified(), "evaluation", "", "The sum of the losses is" if factor == 2 else "The weight is")


def test_finds_random_evaluation(plant):
    def wrong(right, local, *given):
        key = jax.random.fold_in(jax.random.key(0), 0)
        loss = local._loss._replace(loss=lambda *given: local_loss(*given[:-2], key, given[-1]))
        local_loss, local._loss = local._loss.loss, loss
        return right(local, *given)

    plant(composition.DeviceStep, "sums", wrong)
    found(verified(DROPOUT), "evaluation", "", "The sum of the losses is")


def test_reports_model_without_evaluation():
    def loss(params, batch, key):
        jax.random.key_data(key)  # requires a key
        return DROPOUT.loss(params, batch, key)

    result = verified(Model(init=DROPOUT.init, loss=loss))
    assert result.ok, str(result)
    assert "evaluation (one device cannot evaluate the model)" in result.not_looked_at
    assert "evaluation" not in result.proved


def measured(params, batch, key):
    total, weight = MODEL.loss(params, batch, key)
    return total, weight, {"rows": (weight, batch["weights"].size + 0.0 * weight)}


def test_finds_wrong_evaluation_metrics(plant):
    """The loss is right; a metric is summed over some of the devices."""

    def wrong(right, *given):
        sums = right(*given)
        return sums._replace(metrics=jax.tree.map(lambda each: each / 2, sums.metrics))

    model = Model(init=MODEL.init, loss=measured)
    assert verified(model).ok
    plant(composition.DeviceStep, "sums", wrong)
    first = found(verified(model), "evaluation", "metric 'rows'", "those of this metric are not")
    assert first.relative == pytest.approx(0.5)


def averages_verified():
    """ZeRO, whose averages are split over the devices that update them."""
    with x64(FLOAT64):
        layouts = lay_out(MODEL, {"data": {"size": 4, "zero": 1}}, precision=FLOAT64, devices=toy.devices(4))
        step = build_step(MODEL, averaged(optax.sgd(0.1), 0.5), layouts, precision=FLOAT64)
        return verify_step(step, batches(), averages=launch_verify.averages_of(SimpleNamespace(layouts=layouts)))


def test_evaluates_averages_of_parameters_under_zero(plant):
    result = averages_verified()
    assert result.ok, str(result)
    assert "evaluation of the averages" in result.proved
    assert result.to_json()["averages_rel"] == result.errors["evaluation of the averages"].relative < 1e-12

    def wrong(right, plan):
        return lambda state: {**right(plan)(state), "first": state.params["first"]}

    plant(launch_verify, "average_reader", wrong)
    found(averages_verified(), "evaluation of the averages", "", "The sum of the losses is")


SCALED = replace(FLOAT64, loss_scale="dynamic", loss_scale_interval=5)


def test_checks_loss_scaling():
    result = verified(precision=SCALED)
    assert result.ok, str(result)
    assert "a step that is not finite, and the loss scale" in result.proved
    assert verified(precision=replace(SCALED, loss_scale=1024.0)).loss_scale is None


def capped(state, following):
    return following._replace(scale=state.scale.clip(max=following.scale))


SCALES = {
    "not finite": (lambda after, *_: after, lambda _, new: new, "A step whose gradients are not finite changes"),
    "never changes": (lambda _, kept: kept, lambda old, _: old, "After a step whose gradients are not finite, the"),
    "never grows": (lambda _, kept: kept, capped, "After a step that is number 5 in a row to be finite, the"),
}


@pytest.mark.parametrize("name", SCALES)
def test_finds_wrong_loss_scale(name, plant):
    params, scale, text = SCALES[name]

    def wrong(right, after, before, state, norm, precision):
        kept, following = right(after, before, state, norm, precision)
        return params(after, kept), scale(state, following)

    plant(step_file, "accept", wrong)
    found(verified(precision=SCALED), "loss scale", "", text)
