"""The tolerance of a comparison is that of the narrowest numbers in a program; where noise is all, it is measured."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from jax import lax
from spmdkit.parallel import Model, batch_axes, verify
from spmdkit.parallel import data as data_strategy
from spmdkit.parallel.step import train_step as step_file
from spmdkit.parallel.verification.rounding import (
    MAX_WIDER,
    MEASURED_TIMES,
    TOLERANCES,
    measured_by,
    moved,
    narrowing,
    tolerance,
    undecided,
    width,
)


def traced(function, dtype="float32"):
    return jax.make_jaxpr(function)(jnp.ones(3, dtype)).jaxpr


def test_without_a_cast_the_stored_dtype_decides():
    assert tolerance(traced(jnp.sin), "float32") == TOLERANCES["float32"]
    assert tolerance(traced(jnp.sin, "bfloat16"), "bfloat16") == TOLERANCES["bfloat16"]
    assert tolerance(traced(jnp.sin), "float64") == TOLERANCES["float64"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cast_to_fewer_bits_decides(dtype):
    assert tolerance(traced(lambda x: jnp.sin(x.astype(dtype)).astype(x.dtype)), "float32") == TOLERANCES[dtype]


def test_casts_to_more_bits_and_of_whole_numbers_do_not_count(float64):
    assert tolerance(traced(lambda x: x.astype("float64")), "float32") == TOLERANCES["float32"]
    assert tolerance(traced(lambda x: x.astype("float32"), "float16"), "float64") == TOLERANCES["float64"]
    assert tolerance(traced(lambda x: x.astype("int8")), "float64") == TOLERANCES["float64"]
    assert tolerance(traced(lambda x: x.astype("float32"), "float64"), "float64") == TOLERANCES["float32"]


@pytest.mark.parametrize(
    "inside",
    [
        lambda x: lax.scan(lambda carry, _: (narrowed(carry), None), x, length=2)[0],
        lambda x: lax.cond(x.sum() > 0, narrowed, lambda x: x, x),
        lambda x: jax.jit(narrowed)(x),
    ],
    ids=["loop", "branch", "call"],
)
def test_casts_inside_of_programs_count(inside):
    assert tolerance(traced(inside), "float32") == TOLERANCES["bfloat16"]


def narrowed(x):
    return x.astype("bfloat16").astype(x.dtype)


def test_scalars_count_only_where_asked_for():
    program = traced(lambda x: x * narrowed(x.sum()))
    assert tolerance(program, "float32") == TOLERANCES["bfloat16"]
    assert tolerance(program, "float32", scalars=False) == TOLERANCES["float32"]


def test_a_constant_scalar_narrows_no_array(float64):
    """The rate of a dropout, cast to float32: the same number on every mesh."""

    def scaled(x):
        return x * jnp.asarray(0.9, "float64").astype("float32")

    for function in (scaled, jax.jit(scaled), lambda x: lax.scan(lambda x, _: (scaled(x), None), x, length=2)[0]):
        assert tolerance(traced(function, "float64"), "float64") == TOLERANCES["float64"]
    passed = jax.jit(lambda x, rate: x * rate.astype("float32"))
    assert tolerance(traced(lambda x: passed(x, 0.9), "float64"), "float64") == TOLERANCES["float64"]
    assert tolerance(traced(lambda x: passed(x, x.sum()), "float64"), "float64") == TOLERANCES["float32"]


def test_a_narrowing_names_its_array_and_its_line(float64):
    found = narrowing(traced(lambda x: x.astype("float32"), "float64"), "float64")
    assert (found.dtype, found.array) == ("float32", "float64[3]")
    assert found.place.startswith("verification/test_rounding.py:")


def test_width_in_bits():
    assert [width(dtype) for dtype in ("float64", "bfloat16", "")] == [64, 16, 0]


def test_parameters_move_by_their_last_place():
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


def test_an_array_is_measured_by_what_rounding_moves_up_to_a_limit():
    found, bound = np.array([1.0, 2.0]), TOLERANCES["float64"]
    assert measured_by(2.0, found, found, bound) == 2.0
    assert measured_by(2.0, found, found + 1e-12, bound) == 2.0, "less than its size explains"
    assert measured_by(2.0, found, found + 1e-8, bound) == pytest.approx(MEASURED_TIMES * 10, rel=1e-6)
    assert measured_by(2.0, found, found + 1.0, bound) == 2.0 * MAX_WIDER[bound]
    assert measured_by(2.0, found, found + np.nan, bound) == 2.0
    assert measured_by(2.0, found, found + 1.0, TOLERANCES["bfloat16"]) == 2.0
    assert measured_by(0.0, np.zeros((0, 3)), np.zeros((0, 3)), bound) == 0.0


def test_elements_of_which_rounding_decides_the_update():
    gradient = np.array([1e-17, -2e-17, 0.5])
    other = gradient + np.array([3e-17, 1e-17, 1e-17])
    after, flipped = np.array([1.0, 2.0, 3.0]), np.array([1.5, 2.0, 3.0])
    assert undecided((gradient, other), (after, flipped), 1e-6).tolist() == [True, True, False]
    assert not undecided((gradient, other), (after, after), 1e-6).any(), "no element moves"
    flipped = np.array([1.0, 2.0, 3.5])
    assert not undecided((gradient, other), (after, flipped), 1e-6).any(), "its gradient is no rounding"


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


def batches():
    random = np.random.default_rng(0)
    return [
        {
            "inputs": random.normal(size=(ROWS, PLACES, 4)),
            "targets": random.integers(0, 8, ROWS).astype(np.int32),
            "weights": random.choice([0.25, 0.5, 1.0], ROWS),
            "example": np.arange(ROWS, dtype=np.int32),
        }
        for _ in range(2)
    ]


ADAMW = optax.adamw(1e-3)


def verified(optimizer=ADAMW, **options):
    return verify(NORMED, {"data": 4}, batches(), optimizer=optimizer, devices=toy.devices(4), **options)


def errors(result, kind="gradients"):
    return {each.path: each.relative for each in getattr(result, kind)}


def test_a_gradient_that_is_rounding_alone_is_no_difference(monkeypatch):
    result = verified()
    assert result.ok, str(result)
    assert max(errors(result).values()) < 1e-9
    (wider,) = [each for each in result.widened if each.what == "gradients"]
    assert (wider.array, wider.tolerance > 1e-9) == ("before", True)
    assert f"gradients to {wider.tolerance:.1e}: before is moved" in str(result).splitlines()[-1]
    monkeypatch.setattr("spmdkit.parallel.verification.rounding.MAX_WIDER", {})
    strict = verified()
    assert errors(strict)["before"] > 1e-9, "the case is one"
    assert max(error for path, error in errors(strict).items() if path != "before") < 1e-12


@pytest.mark.slow
def test_the_sign_of_rounding_is_no_difference(monkeypatch):
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


@pytest.mark.parametrize("name", ["after", "little", "kernel"])
def test_a_part_in_a_thousand_is_found_beside_it(name, monkeypatch):
    right = data_strategy.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        return {**summed, name: summed[name] * 1.001} if name in summed else summed, scalars

    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    result = verified()
    assert (result.first_difference.what, result.first_difference.where) == ("gradients", name)
    assert result.first_difference.relative > 1e-7


@pytest.mark.parametrize("name", ["before", "little"])
def test_a_missing_sum_of_a_small_gradient_is_found_beside_it(name, monkeypatch):
    """Of the array that is noise itself too: before the sum it is none."""
    right = data_strategy.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        return {**summed, name: gradients[name]} if name in summed else summed, scalars

    checked = jax.shard_map
    monkeypatch.setattr(data_strategy, "reduce_gradients", wrong)
    monkeypatch.setattr(jax, "shard_map", lambda *given, **more: checked(*given, **{**more, "check_vma": False}))
    result = verified()
    assert (result.first_difference.what, result.first_difference.where) == ("gradients", name)
