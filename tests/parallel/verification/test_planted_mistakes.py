"""Each mistake that is planted in the strategies or the step is found, named and explained."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from planted import (
    AXES,
    DROPOUT,
    WIDTH,
    Namespace,
    found,
    one_device_is_compiled_once,  # noqa: F401  (a fixture of every test here)
    unchecked,
    verified,
)
from spmdkit.parallel import FSDPConfig, Model
from spmdkit.parallel import data as data_strategy
from spmdkit.parallel.step import composition
from spmdkit.parallel.step import train_step as step_file
from spmdkit.parallel.step import update as update_file


def test_a_missing_sum_is_refused(monkeypatch):
    monkeypatch.setattr(data_strategy, "reduce_gradients", unsummed("first"))
    found(verified(), "gradients", "first", "JAX refuses the step", "a missing psum over data.")


def unsummed(leaf):
    """Sums everything but one gradient."""
    right = data_strategy.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        return {**summed, leaf: gradients[leaf]} if isinstance(summed, dict) else summed, scalars

    return wrong


@pytest.mark.parametrize(("leaf", "axes"), [("first", "data"), ("scale", "data x fsdp")])
def test_a_missing_sum_that_nobody_refuses(leaf, axes, monkeypatch):
    monkeypatch.setattr(data_strategy, "reduce_gradients", unsummed(leaf))
    with unchecked(monkeypatch):
        result = verified()
    texts = (f"Devices along {axes} hold different values, and their sum is the reference",)
    found(result, "gradients", leaf, *texts, f"a missing psum over {axes}", f"lacks {axes}")


@pytest.mark.parametrize("axis", AXES)
def test_a_doubled_sum(axis, monkeypatch):
    right = data_strategy.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        twice = lax.psum(lax.pcast(summed["scale"], axis, to="varying"), axis)
        return {**summed, "scale": twice}, scalars

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    result = verified(strategy={"data": 4} if axis == "data" else {"fsdp": FSDPConfig(size=4, floor_bytes=512)})
    found(result, "gradients", "scale", "4 times the reference in every element.")


def test_a_doubled_sum_of_everything_is_not_hidden_by_clipping(monkeypatch):
    right = composition.accumulate_gradients

    def wrong(*given, axes, **options):
        gradients, sums = right(*given, axes=axes, **options)
        return jax.tree.map(lambda leaf: lax.psum(leaf, axes) / 2, gradients), sums

    monkeypatch.setattr(composition, "accumulate_gradients", wrong)
    with unchecked(monkeypatch):
        result = verified(strategy={"data": 4}, clip_norm=0.01)
    first = found(result, "gradients", result.gradients[0].path, "Every gradient is 2 times the reference")
    assert first.relative == pytest.approx(1)


def test_three_millionths_are_found_beside_dropout(monkeypatch):
    """The rate, in float32, is one number: nothing of the model is computed in float32."""
    right = composition.accumulate_gradients

    def dropped(params, batch, key):
        keep = jnp.float32(1 - 0.2)
        return DROPOUT.loss(params, {**batch, "inputs": batch["inputs"] / keep}, key)

    def wrong(*given, **options):
        gradients, sums = right(*given, **options)
        return jax.tree.map(lambda leaf: leaf * (1 + 3e-6), gradients), sums

    monkeypatch.setattr(composition, "accumulate_gradients", wrong)
    result = verified(Model(init=DROPOUT.init, loss=dropped))
    assert result.tolerance == 1e-9
    found(result, "gradients", result.gradients[0].path, "Every gradient is 1 + 3.0e-06 times the reference")


@pytest.mark.slow
def test_an_average_instead_of_a_sum(monkeypatch):
    right = data_strategy.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        return {**summed, "first": summed["first"] / 2}, scalars

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    found(verified(), "gradients", "first", "0.5 times the reference in every element.")


def test_shards_gathered_in_another_order(monkeypatch):
    right = lax.all_gather

    def wrong(shard, axes, **options):
        whole = right(shard, axes, **options)
        return jnp.roll(whole, 1, axis=0) if whole.shape == (WIDTH, WIDTH) else whole

    monkeypatch.setattr(lax, "all_gather", wrong)
    found(verified(), "loss", "", "The weight is right; the sum of the losses is", "times the reference.")


def test_a_gradient_scattered_along_the_wrong_dim(monkeypatch):
    right = lax.psum_scatter

    def wrong(gradient, axes, **options):
        return right(gradient.T if gradient.shape == (WIDTH, WIDTH) else gradient, axes, **options)

    monkeypatch.setattr(lax, "psum_scatter", wrong)
    result = verified(strategy={"fsdp": FSDPConfig(size=4, floor_bytes=512)})
    found(result, "gradients", "first", "The same numbers in other places.", "(fsdp, None)")


def test_a_mean_of_means(monkeypatch):
    right = composition.accumulate_gradients

    def wrong(*given, **options):
        gradients, sums = right(*given, **options)
        mean = jax.tree.map(lambda leaf: leaf / sums.weight, gradients)
        return mean, sums._replace(total=sums.total / sums.weight, weight=sums.weight / sums.weight)

    monkeypatch.setattr(composition, "accumulate_gradients", wrong)
    result = verified(strategy={"data": 4})
    found(result, "loss", "", "divided by a weight of 4, and one device by")


def test_a_weight_summed_twice(monkeypatch):
    right = data_strategy.reduce_gradients

    def wrong(gradients, scalars, *rest):
        summed, (total, weight, *others) = right(gradients, scalars, *rest)
        return summed, [total, 4 * weight, *others]

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    result = verified(strategy={"data": 4})
    found(result, "loss", "", "divided by a weight of")


def test_a_dropped_microbatch(monkeypatch):
    right = composition.accumulate_gradients

    def wrong(local, params, batch, *rest, microbatches, axes):
        fewer = {name: rows[: len(rows) * (microbatches - 1) // microbatches] for name, rows in batch.items()}
        return right(local, params, fewer, *rest, microbatches=microbatches - 1, axes=axes)

    monkeypatch.setattr(composition, "accumulate_gradients", wrong)
    result = verified(accumulate=2)
    found(result, "loss", "", "microbatch 2 of the 2 of every device (rows 2, 3, 6, 7,", "is not counted")


@pytest.mark.slow
def test_gradients_of_a_dropped_microbatch(monkeypatch):
    """Loss and weight count it, the gradients do not."""
    right = composition.accumulate_gradients

    def wrong(local, params, batch, *rest, microbatches, axes):
        _, sums = right(local, params, batch, *rest, microbatches=microbatches, axes=axes)
        fewer = {name: rows[len(rows) // microbatches :] for name, rows in batch.items()}
        return right(local, params, fewer, *rest, microbatches=microbatches - 1, axes=axes)[0], sums

    monkeypatch.setattr(composition, "accumulate_gradients", wrong)
    result = verified(accumulate=4)
    found(result, "gradients", result.gradients[0].path, "Microbatch 1 of the 4 of every device", "is not counted")


@pytest.mark.slow
def test_rows_of_one_place_counted_twice(monkeypatch):
    right = composition.accumulate_gradients

    def wrong(*given, **options):
        gradients, sums = right(*given, **options)
        factor = 1 + (lax.axis_index("data") == 1)
        return gradients, sums._replace(total=sums.total * factor, weight=sums.weight * factor)

    monkeypatch.setattr(composition, "accumulate_gradients", wrong)
    found(verified(), "loss", "", "what lies at data 1 (rows 8, 9, 10,", "counts 2 times")


def test_a_wrong_norm(monkeypatch):
    right = composition.global_norm

    def wrong(gradients, *rest):
        return right({**gradients, "scale": gradients["scale"] * 2**0.5}, *rest)

    monkeypatch.setattr(composition, "global_norm", wrong)
    result = verified(clip_norm=0.1)
    found(result, "gradient norm", "", "times the reference, while every gradient is right.")


def test_a_wrong_update(monkeypatch):
    right = optax.apply_updates
    monkeypatch.setattr(
        step_file.optax, "apply_updates", lambda params, updates: {**right(params, updates), "scale": params["scale"]}
    )
    monkeypatch.setattr("spmdkit.parallel.verification.reference.optax", Namespace(optax, apply_updates=right))
    found(verified(), "parameters", "scale", "so it is the update", "the losses agree until step 1")


def test_a_norm_of_a_part_clips(monkeypatch):
    """What is reported is right, what gradients are clipped by is not."""
    right = composition.clip_factor
    monkeypatch.setattr(composition, "clip_factor", lambda norm, clip_norm: right(norm / 2, clip_norm))
    result = verified(clip_norm=0.1)
    found(
        result,
        "gradients",
        result.gradients[0].path,
        "Every gradient is 2 times",
        "the norm that the step reports is right.",
    )


def test_sums_and_weight_scaled_alike(monkeypatch):
    """The mean and its gradients are right; what several batches would be summed up to is not."""
    right = data_strategy.reduce_gradients

    def wrong(gradients, scalars, *rest):
        summed, (total, weight, *others) = right(gradients, scalars, *rest)
        twice = jax.tree.map(lambda leaf: 2 * leaf, summed)
        return twice, [2 * total, 2 * weight, *(4 * each for each in others)]

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    result = verified()
    found(result, "weight", "", "2 times the reference.", "The mean is right, the sums are not.")
    assert result.loss_rel < 1e-12


def test_a_step_that_reports_another_weight(monkeypatch):
    """Only the step does; its gradients, alone, report it rightly."""
    right = step_file.Step._step

    def wrong(step, gradients, state, batch):
        state, metrics = right(step, gradients, state, batch)
        return state, metrics._replace(weight=metrics.weight * (1 + (state.step == 2)))

    monkeypatch.setattr(step_file.Step, "_step", wrong)
    found(verified(), "what a step reports", "weight of step 1", "the weight of step 1 is reported wrongly")


def test_decay_applied_twice(monkeypatch):
    def wrong(params, updates):
        return jax.tree.map(lambda leaf, update: leaf + update - 1e-4 * leaf, params, updates)

    monkeypatch.setattr(update_file, "optax", Namespace(optax, apply_updates=wrong))
    result = verified()
    found(result, "parameters", result.params[0].path, "so it is the update", "-0.0001 times itself added")


def test_a_count_that_changes_no_parameter_yet(monkeypatch):
    """The optimizer starts at step 1: its schedule is constant for as long as is looked."""
    right = step_file.Step._first_state

    def wrong(step, params, key_data):
        state = right(step, params, key_data)
        return state._replace(opt_state=jax.tree.map(lambda leaf: leaf + (leaf.ndim == 0), state.opt_state))

    monkeypatch.setattr(step_file.Step, "_first_state", wrong)
    result = verified(optimizer=COUNTED)
    found(result, "optimizer's state", "1/count", "what later updates begin with")


COUNTED = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: -0.1))


def test_the_random_numbers_of_the_first_step_in_all(monkeypatch):
    right = composition.DeviceStep.gradients

    def wrong(local, params, batch, key_data, step, *rest):
        return right(local, params, batch, key_data, step * 0, *rest)

    monkeypatch.setattr(composition.DeviceStep, "gradients", wrong)
    result = verified(DROPOUT)
    text = "It is that with the random numbers of step 0: the step is not folded into the key."
    first = found(result, "parameters", result.params[0].path, "at the same parameters, the loss of step 1", text)
    assert "update" not in first.hint


def test_a_collective_that_nobody_predicts(monkeypatch):
    right = data_strategy.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        again = lax.psum(lax.pcast(summed["scale"], "data", to="varying"), "data") / 2
        return {**summed, "scale": again}, scalars

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    result = verified()
    found(result, "collectives", "", "all-reduce over data: 1 moving 1,536 bytes predicted", "1,664 bytes found")
    assert "NOT as predicted" in str(result)


def test_initial_parameters_that_depend_on_the_mesh(monkeypatch):
    right = step_file.Step.init

    def wrong(step, seed):
        return right(step, seed + 1)

    monkeypatch.setattr(step_file.Step, "init", wrong)
    result = verified()
    found(result, "initial parameters", result.first_difference.where, "The same seed draws other parameters")
