"""Strategies are as one device; what the model does by itself, and what was not looked at, is said."""

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
    BLOCK_MODEL,
    DROPOUT,
    MODEL,
    found,
    loss,
    one_device_is_compiled_once,  # noqa: F401  (a fixture of every test here)
    verified,
)
from spmdkit.parallel import FSDPConfig, Precision, verify
from spmdkit.parallel.verification import diagnosis
from spmdkit.parallel.verification.result import NO_GRADIENT, NOT_FINITE

# What is right


@cache
def right():
    return verified(accumulate=2, clip_norm=0.1)


def test_everything_agrees():
    result = right()
    assert result.ok, str(result)
    assert {each.path for each in result.gradients} == {"first", "scale", "second"}
    assert result.losses == pytest.approx(result.reference_losses, rel=1e-12)
    assert result.tolerance == result.params_tolerance == 1e-9
    assert result.widened == ()
    assert "wider tolerances" not in str(result)
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
    (widened,) = result.widened
    assert (widened.what, widened.array, widened.tolerance) == ("loss and gradients", "float64[16,16]", 1e-5)
    assert "is cast to float32 at verification/test_compare.py:" in widened.reason
    assert str(result).splitlines()[-1].endswith(f"; wider tolerances: {widened}")
    assert result.to_json()["widened"] == [widened._asdict()]


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
    assert last.startswith("proved: initial parameters, loss, weight, gradients, gradient norm, 2 steps")
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


def test_refusals_of_other_kinds_are_not_taken_for_missing_sums():
    assert diagnosis.refused(ValueError("something else"), None) is None
