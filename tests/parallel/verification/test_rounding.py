"""Tolerances: those of the narrowest dtype in a program, and measured ones for arrays of rounding noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from spmdkit.parallel import Model, batch_axes, verify
from spmdkit.parallel import data as data_strategy
from spmdkit.parallel.step import train_step as step_file
from spmdkit.parallel.verification.rounding import (
    MAX_WIDER,
    MEASURED_TIMES,
    TOLERANCES,
    error_scale,
    moved,
    narrowing,
    undecided,
)
from support import toy
from support.verification import batches, unchecked
from support.verification import one_device_is_compiled_once as one_device_is_compiled_once


def tolerance(jaxpr, stored, **options):
    return narrowing(jaxpr, stored, **options).tolerance


def traced(function, dtype="float32"):
    return jax.make_jaxpr(function)(jnp.ones(3, dtype)).jaxpr


def narrowed(x):
    return x.astype("bfloat16").astype(x.dtype)


@pytest.mark.parametrize(
    ("function", "given", "stored", "narrowest"),
    [
        (jnp.sin, "float32", "float32", "float32"),
        (jnp.sin, "bfloat16", "bfloat16", "bfloat16"),
        (lambda x: jnp.sin(x.astype("float16")).astype(x.dtype), "float32", "float32", "float16"),
        (lambda x: x.astype("float64"), "float32", "float32", "float32"),
        (lambda x: x.astype("float32"), "float16", "float64", "float64"),
        (lambda x: x.astype("float32"), "float64", "float64", "float32"),
        (lambda x: x.astype("int8"), "float32", "float64", "float64"),
        (
            lambda x: lax.scan(lambda carry, _: (narrowed(carry), None), x, length=2)[0],
            "float32",
            "float32",
            "bfloat16",
        ),
        (lambda x: lax.cond(x.sum() > 0, narrowed, lambda x: x, x), "float32", "float32", "bfloat16"),
        (lambda x: jax.jit(narrowed)(x), "float32", "float32", "bfloat16"),
    ],
)
def test_tolerance_is_that_of_narrowest_dtype(function, given, stored, narrowest, float64):
    assert tolerance(traced(function, given), stored) == TOLERANCES[narrowest]
    assert tolerance(traced(lambda x: x.astype("float8_e4m3fn")), "float32") == 0, "not a dtype of a run"


def test_counts_scalars_only_if_requested():
    program = traced(lambda x: x * narrowed(x.sum()))
    assert tolerance(program, "float32") == TOLERANCES["bfloat16"]
    assert tolerance(program, "float32", scalars=False) == TOLERANCES["float32"]


def test_ignores_constant_scalars(float64):
    """The rate of a dropout, cast to float32: the same number on every mesh."""

    def scaled(x):
        return x * jnp.asarray(0.9, "float64").astype("float32")

    for function in (scaled, jax.jit(scaled), lambda x: lax.scan(lambda x, _: (scaled(x), None), x, length=2)[0]):
        assert tolerance(traced(function, "float64"), "float64") == TOLERANCES["float64"]
    passed = jax.jit(lambda x, rate: x * rate.astype("float32"))
    assert tolerance(traced(lambda x: passed(x, 0.9), "float64"), "float64") == TOLERANCES["float64"]
    assert tolerance(traced(lambda x: passed(x, x.sum()), "float64"), "float64") == TOLERANCES["float32"]


def test_moves_parameters_by_last_place():
    params = {"a": np.linspace(1, 2, 50), "zero": np.zeros(3), "count": np.arange(3)}
    found = moved(params, TOLERANCES["float64"])
    steps = np.abs(found["a"] - params["a"]) / np.spacing(params["a"])
    assert 1 <= steps.min() <= steps.max() <= 2
    assert len(set(np.sign(found["a"] - params["a"]))) == 2
    assert not found["zero"].any()
    assert found["count"] is params["count"]
    wide = moved({"a": np.ones(5, np.float32)}, TOLERANCES["float32"])["a"]
    assert wide.dtype == np.float32
    assert np.abs(wide - 1) == pytest.approx(np.full(5, 2.0**-23), rel=0.6)


def test_scale_of_error_grows_with_rounding_up_to_limit():
    found, bound = np.array([1.0, 2.0]), TOLERANCES["float64"]
    assert error_scale(2.0, found, found, bound) == 2.0
    assert error_scale(2.0, found, found + 1e-12, bound) == 2.0, "less than its size explains"
    assert error_scale(2.0, found, found + 1e-8, bound) == pytest.approx(MEASURED_TIMES * 10, rel=1e-6)
    assert error_scale(2.0, found, found + 1.0, bound) == 2.0 * MAX_WIDER[bound]
    assert error_scale(2.0, found, found + np.nan, bound) == 2.0
    assert error_scale(2.0, found, found + 1.0, TOLERANCES["bfloat16"]) == 2.0
    assert error_scale(0.0, np.zeros((0, 3)), np.zeros((0, 3)), bound) == 0.0


def test_masks_elements_with_update_decided_by_rounding():
    gradient = np.array([2e-16, -2e-17, 0.5])  # the first is several times the effect of rounding
    other = gradient + np.array([3e-17, 1e-17, 1e-17])
    after, flipped = np.array([1.0, 2.0, 3.0]), np.array([1.5, 2.0, 3.0])
    assert undecided(gradient, other, after, flipped, 1e-6).tolist() == [True, True, False]
    assert not undecided(gradient, other, after, after, 1e-6).any(), "no element moves"
    flipped = np.array([1.0, 2.0, 3.5])
    assert not undecided(gradient, other, after, flipped, 1e-6).any(), "its gradient is no rounding"


WIDTH, ROWS, PLACES, SMALL = 8, 16, 32, 1e-4


def init(key):
    first, second = jax.random.split(key)
    return {
        "kernel": jax.random.normal(first, (4, WIDTH)),
        "before": jnp.zeros(WIDTH),  # the norm takes it off again
        "after": jnp.zeros(WIDTH),
        "little": jnp.zeros(WIDTH),
        "out": jax.random.normal(second, (WIDTH, 8)),
    }


def normed_loss(params, batch, key):
    """Activations as small as some are at the start: their gradients are as large, and noise is with them."""
    x = 2e-2 * (batch["inputs"] @ params["kernel"]) + params["before"][None, None]
    mean, square = (lax.pmean(each.mean((0, 1)), batch_axes()) for each in (x, x * x))
    x = (x - mean[None, None]) * lax.rsqrt(square - mean**2 + 1e-12)[None, None]
    x = jnp.tanh(x + params["after"][None, None] + SMALL * params["little"][None, None]).mean(1)
    return toy.cross_entropy(x @ params["out"], batch)


NORMED = Model(init=init, loss=normed_loss, name="normed")


ADAMW = optax.adamw(1e-3)


def verified(optimizer=ADAMW, **options):
    given = batches((ROWS, PLACES, 4), classes=8, dtype="float64")
    return verify(NORMED, {"data": 4}, given, optimizer=optimizer, devices=toy.devices(4), **options)


def errors(result, kind="gradients"):
    return {each.path: each.relative for each in getattr(result, kind)}


@pytest.mark.slow
def test_ignores_gradient_of_rounding_alone(monkeypatch):
    result = verified()
    assert result.ok, str(result)
    assert max(errors(result).values()) < 1e-9
    (wider,) = [each for each in result.widened if each.what == "gradients"]
    assert (wider.array, wider.tolerance > 1e-9) == ("before", True)
    assert f"gradients to {wider.tolerance:.1e}: before changes as much" in str(result).splitlines()[-1]
    monkeypatch.setattr("spmdkit.parallel.verification.rounding.MAX_WIDER", {})
    strict = verified()
    assert errors(strict)["before"] > 1e-9, "the case is one"
    assert max(error for path, error in errors(strict).items() if path != "before") < 1e-12


@pytest.mark.slow
def test_ignores_sign_of_rounding(monkeypatch):
    """lion moves a bias whose true gradient is zero by its whole rate, up or down: the other arrays are compared."""
    result = verified(optax.lion(1e-2))
    assert result.ok, str(result)
    (out,) = [each for each in result.widened if each.what == "parameters"]
    assert (out.array, out.tolerance) == ("before", None)
    assert "before is not compared in 8 elements" in str(result).splitlines()[-1]
    assert out._asdict() in result.to_json()["widened"]
    right = step_file.apply_optimizer

    def wrong(*given):
        params, state = right(*given)
        return {**params, "after": params["after"] * (1 + 1e-7)}, state

    monkeypatch.setattr(step_file, "apply_optimizer", wrong)
    result = verified(optax.lion(1e-2))
    assert (result.first_difference.what, result.first_difference.where) == ("parameters", "after")


def plant(monkeypatch, change):
    """Changes one summed gradient: change(summed, gradient of a device)."""
    right = data_strategy.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        return change(summed, gradients) if isinstance(summed, dict) else summed, scalars

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)


@pytest.mark.slow_cases("after", "kernel", "little")
@pytest.mark.parametrize("name", ["after", "little", "kernel"])
def test_finds_part_in_a_thousand_beside_rounding(name, monkeypatch):
    plant(monkeypatch, lambda summed, _: {**summed, name: summed[name] * 1.001})
    result = verified()
    assert (result.first_difference.what, result.first_difference.where) == ("gradients", name)
    assert result.first_difference.relative > 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["before", "little"])
def test_finds_missing_sum_of_small_gradient(name, monkeypatch):
    """Also for the array that is noise after the sum, since before the sum it is not."""
    plant(monkeypatch, lambda summed, gradients: {**summed, name: gradients[name]})
    with unchecked(monkeypatch):
        result = verified()
    assert (result.first_difference.what, result.first_difference.where) == ("gradients", name)
