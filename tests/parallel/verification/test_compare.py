"""Strategies are as one device; each planted mistake is found, named and explained."""

import json
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
import toy
from jax import lax
from planted import (
    AXES,
    BLOCK_MODEL,
    DROPOUT,
    MODEL,
    OPTIMIZER,
    WIDTH,
    Namespace,
    found,
    given_init,
    loss,
    one_device_is_compiled_once,  # noqa: F401  (a fixture of every test here)
    unchecked,
    verified,
)
from spmdkit.parallel import BlockModel, FSDPConfig, Precision, verify
from spmdkit.parallel import data as data_strategy
from spmdkit.parallel.executor.stage import Stage
from spmdkit.parallel.step import composition
from spmdkit.parallel.step import train_step as step_file
from spmdkit.parallel.step import update as update_file
from spmdkit.parallel.verification import diagnosis
from spmdkit.parallel.verification.result import NO_GRADIENT, NOT_FINITE

# What is right


@cache
def right():
    return verified(accumulate=2, clip_norm=0.1)


def test_everything_agrees():
    result = right()
    assert result.ok, str(result)
    assert {path for _, path in result.gradients} == {"first", "scale", "second"}
    assert result.losses == pytest.approx(result.reference_losses, rel=1e-12)
    assert result.tolerance == result.params_tolerance == 1e-9
    assert max(result.loss_rel, result.gradients[0].relative, result.grad_norm_rel, result.params[0].relative) < 1e-13
    assert result.collectives.found == result.collectives.predicted != ()
    assert "The same as on one device." in str(result)
    assert not jax.config.jax_enable_x64


def test_json_has_what_programs_read():
    result = right().to_json()
    json.dumps(result, allow_nan=False)
    for key in ("ok", "mesh", "loss_rel", "grad_max_rel", "worst_leaf", "params_rel", "collectives"):
        assert key in result
    assert {axis: size for axis, size in result["mesh"].items() if size > 1} == {"data": 2, "fsdp": 2}
    assert result["collectives"]["equal"] is True
    assert result["collectives"]["predicted"] == result["collectives"]["found"]
    assert (result["dtype"], result["first_difference"]) == ("float64", None)


@pytest.mark.slow
def test_float32_has_its_own_tolerance():
    result = verified(precision=Precision())
    assert result.ok, str(result)
    assert (result.dtype, result.tolerance) == ("float32", 1e-5)
    assert result.gradients[0].relative > 1e-12


def test_a_model_that_casts_to_float32_is_measured_as_such():
    def narrow(params, batch, key):
        return loss(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), batch, key)

    result = verified(replace(MODEL, loss=narrow))
    assert result.ok, str(result)
    assert (result.dtype, result.tolerance) == ("float64", 1e-5)


@pytest.mark.slow
def test_dropout_is_that_of_one_device():
    result = verified(DROPOUT, accumulate=2)
    assert result.ok, str(result)
    assert "random numbers" in result.proved


def test_an_optimizer_that_looks_across_elements_may_move_what_nobody_predicts():
    result = verified(optimizer=optax.chain(optax.scale_by_param_block_norm(), optax.sgd(0.1)))
    assert result.ok, str(result)
    assert result.collectives.left_to_xla
    assert "left to XLA" in str(result)


@pytest.mark.slow
def test_blocks_accumulation_and_rules_over_an_axis_of_xla():
    strategy = {"data": 2, "fsdp": FSDPConfig(size=2, floor_bytes=256), "tensor": {"size": 2}}
    rules = {"blocks/up": (None, "fsdp", "tensor")}
    given = [toy.batch(seed) for seed in range(3)]
    result = verify(BLOCK_MODEL, strategy, given, rules=rules, accumulate=2, clip_norm=0.5)
    assert result.ok, str(result)
    assert any("tensor" in line.axes for line in result.collectives.left_to_xla)


# What is wrong


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
    found(result, "gradients", "scale", f"4 times too large, as when summed twice over {axis} (size 4)")


def test_a_doubled_sum_of_everything_is_not_hidden_by_clipping(monkeypatch):
    right = composition.accumulate_gradients

    def wrong(*given, axes, **options):
        gradients, sums = right(*given, axes=axes, **options)
        return jax.tree.map(lambda leaf: lax.psum(leaf, axes) / 2, gradients), sums

    monkeypatch.setattr(composition, "accumulate_gradients", wrong)
    with unchecked(monkeypatch):
        result = verified(strategy={"data": 4}, clip_norm=0.01)
    first = found(result, "gradients", result.gradients[0].path, "2 times the reference everywhere")
    assert first.relative == pytest.approx(1)


@pytest.mark.slow
def test_an_average_instead_of_a_sum(monkeypatch):
    right = data_strategy.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        return {**summed, "first": summed["first"] / 2}, scalars

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    found(
        verified(), "gradients", "first", "2 times too small, as when averaged instead of summed", "over data (size 2)"
    )


def test_shards_gathered_in_another_order(monkeypatch):
    right = lax.all_gather

    def wrong(shard, axes, **options):
        whole = right(shard, axes, **options)
        return jnp.roll(whole, 1, axis=0) if whole.shape == (WIDTH, WIDTH) else whole

    monkeypatch.setattr(lax, "all_gather", wrong)
    found(verified(), "loss", "", "set to one number the losses agree", "first", "put together wrongly")


def test_a_gradient_scattered_along_the_wrong_dim(monkeypatch):
    right = lax.psum_scatter

    def wrong(gradient, axes, **options):
        return right(gradient.T if gradient.shape == (WIDTH, WIDTH) else gradient, axes, **options)

    monkeypatch.setattr(lax, "psum_scatter", wrong)
    result = verified(strategy={"fsdp": FSDPConfig(size=4, floor_bytes=512)})
    found(result, "gradients", "first", "The same numbers in other places", "(fsdp, None)")


def test_a_mean_of_means(monkeypatch):
    right = composition.accumulate_gradients

    def wrong(*given, **options):
        gradients, sums = right(*given, **options)
        mean = jax.tree.map(lambda leaf: leaf / sums.weight, gradients)
        return mean, sums._replace(total=sums.total / sums.weight, weight=sums.weight / sums.weight)

    monkeypatch.setattr(composition, "accumulate_gradients", wrong)
    result = verified(strategy={"data": 4})
    found(result, "loss", "", "divided by a weight of 4, and one device by", "a mean of 4 means")


def test_a_weight_summed_twice(monkeypatch):
    right = data_strategy.reduce_gradients

    def wrong(gradients, scalars, *rest):
        summed, (total, weight, *others) = right(gradients, scalars, *rest)
        return summed, [total, 4 * weight, *others]

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    result = verified(strategy={"data": 4})
    found(result, "loss", "", "divided by a weight of", "4 times too large, as when summed twice over data (size 4)")


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
    found(result, "gradient norm", "", "every device holds whole are counted 2 times")


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
        "norm that the step reports is right",
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
    found(result, "weight", "", "the mean is right, the sums are not", "2 times too large")
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


def test_a_model_that_is_not_finite_is_the_models_own():
    def broken(params, batch, key):
        total, weight = loss(params, batch, key)
        return total * jnp.nan, weight

    result = verified(replace(MODEL, loss=broken))
    found(result, NOT_FINITE, "", "It is nan on one device as well")
    json.dumps(result.to_json(), allow_nan=False)


# What the model does on one device already


def test_a_model_whose_gradients_are_all_zero():
    def dead(params, batch, key):
        total, weight = loss(params, batch, key)
        return total * 0, weight

    result = verified(replace(MODEL, loss=dead))
    found(result, NO_GRADIENT, "", "Every gradient of the first batch is zero on one device as well, in all 3 arrays")
    assert result.proved == ()


def test_a_parameter_without_a_gradient_is_not_looked_at():
    def frozen(params, batch, key):
        return loss({**params, "first": lax.stop_gradient(params["first"])}, batch, key)

    result = verified(replace(MODEL, loss=frozen))
    assert result.ok, str(result)
    assert "gradients that are zero on one device (first)" in result.not_looked_at


def test_rows_that_depend_on_each_other():
    """A batch norm: every device would take the mean of its own rows."""

    def normed(params, batch, key):
        inputs = batch["inputs"]
        return loss(params, {**batch, "inputs": inputs - inputs.mean(axis=0)[None]}, key)

    first = found(
        verified(replace(MODEL, loss=normed)), "loss", "", "The model, not the strategy", "on one device as well"
    )
    assert "its rows depend on each other" in first.hint
    assert "is not counted" not in first.hint


def test_masks_that_fold_in_no_row():
    def stock(params, batch, key):
        keep = jax.random.bernoulli(key, 0.8, batch["inputs"].shape)
        return loss(params, {**batch, "inputs": batch["inputs"] * keep}, None)

    result = verified(replace(MODEL, loss=stock))
    found(result, "loss", "", "The model, not the strategy", "its random numbers depend on which rows are together")


# What a run says of itself


def test_what_is_proved_and_what_is_not_looked_at():
    result = right()
    last = str(result).splitlines()[-1]
    assert last.startswith("proved: initial parameters, loss, weight, gradients, gradient norm, 2 step(s)")
    proved, unseen = last.split("; not looked at: ")
    assert proved.removeprefix("proved: ") == ", ".join(result.proved)
    assert unseen == ", ".join(result.not_looked_at)
    assert "the state in memory restored onto fsdp 4 and back" in result.proved
    for text in (
        "the code of the model and the optimizer (both sides run it)",
        "checkpoint files",
        "later tokens (the batch holds no inputs, targets and weights of every position)",
        "random numbers (the loss does not depend on the key)",
        "other dtypes than float64",
    ):
        assert text in result.not_looked_at
    read = result.to_json()
    assert (tuple(read["proved"]), tuple(read["not_looked_at"])) == (result.proved, result.not_looked_at)
    assert (read["evaluation_rel"], read["checkpoint"]["differing"]) == (result.evaluation_rel, [])


def test_clipping_that_never_acts_is_said(monkeypatch):
    assert not any("clipping" in each for each in right().not_looked_at)
    assert "clipping (no norm was over 1000)" in verified(clip_norm=1000.0).not_looked_at


# A model that splits its own work


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
    assert isinstance(TENSOR_MODEL, BlockModel)
    given = [toy.batch(seed, rows=4) for seed in range(2)]
    return verify(TENSOR_MODEL, {"data": 2, "tensor": 2}, given, optimizer=OPTIMIZER, devices=toy.devices(4))


def test_a_missing_sum_over_tensor(monkeypatch):
    """The gradient of a parameter that every device of `tensor` holds is summed over `data` alone."""
    right = data_strategy.reduce_gradients

    def wrong(gradients, scalars, layouts, axes, dtype):
        summed, scalars = right(gradients, scalars, layouts, axes, dtype)
        blocks = {**summed["blocks"], "scale": lax.psum(gradients["blocks"]["scale"], "data")}
        return {**summed, "blocks": blocks}, scalars

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    with unchecked(monkeypatch):
        result = verified_tensor()
    found(result, "gradients", "blocks/scale", "Devices along tensor hold different", "a missing psum over tensor")


@pytest.mark.slow
def test_numbers_of_a_model_that_splits_its_own_work():
    """It predicts none of its own traffic, and that is all that is found."""
    found(verified_tensor(), "collectives", "", "all-gather over tensor: none predicted")


def test_refusals_of_other_kinds_are_not_taken_for_missing_sums():
    assert diagnosis.refused(ValueError("something else"), None) is None


# Pipelines


def verified_pipeline(**options):
    given = [toy.batch(seed, rows=8) for seed in range(2)]
    return verify(BLOCK_MODEL, {"pipe": {"size": 2, **options}}, given, optimizer=OPTIMIZER, devices=toy.devices(2))


@pytest.mark.slow
def test_blocks_that_are_stored_in_another_order():
    """5 blocks on 2 stages of 2 chunks, the second in the opposite order, with places that are filled up."""

    def five(key):
        params = given_init(key)
        return {**params, "blocks": jax.tree.map(lambda leaf: jnp.concatenate([leaf, -leaf[:2]]), params["blocks"])}

    model = replace(BLOCK_MODEL, init=five, num_blocks=5)
    strategy = {"pipe": {"size": 2, "schedule": "zbv", "microbatches": 2}}
    result = verify(model, strategy, [toy.batch(seed, rows=4) for seed in range(2)], devices=toy.devices(2))
    assert result.ok, str(result)


def test_a_head_that_drops_a_microbatch(monkeypatch):
    """Neither loss nor weight counts it, and no gradient starts from it."""
    right = Stage.head

    def wrong(stage, tick, groups, y):
        sums = right(stage, tick, groups, y)
        counts = (tick.entry.microbatch != 1).astype(sums.total.dtype)
        return jax.tree.map(lambda leaf: leaf * counts, sums)

    monkeypatch.setattr(Stage, "head", wrong)
    found(verified_pipeline(), "loss", "", "microbatch 2 of the 4 of every device (rows 2, 3 of 8) is not counted")


@pytest.mark.slow
def test_a_stage_that_drops_a_microbatch(monkeypatch):
    """The loss counts it, but one stage leaves it out of the gradients of its layers."""
    right = Stage.backward_weight

    def wrong(stage, tick, *given):
        entry = tick.entry
        dropped = (entry.microbatch == 2) & (lax.axis_index("pipe") == 0)
        tick.entry = entry._replace(num_blocks=jnp.where(dropped, 0, entry.num_blocks))
        gradients = right(stage, tick, *given)
        tick.entry = entry
        return gradients

    monkeypatch.setattr(Stage, "backward_weight", wrong)
    result = verified_pipeline()
    first = found(
        result, "gradients", result.gradients[0].path,
        "On stage 0 of pipe alone: microbatch 3 of the 4 of every device (rows 4, 5 of 8) is not counted",
    )  # fmt: skip
    assert first.where.startswith("blocks/")
