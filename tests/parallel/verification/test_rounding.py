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
from spmdkit.parallel.verification.rounding import (
    MEASURED_TIMES,
    MOST_WIDER,
    TOLERANCES,
    measured_by,
    moved,
    tolerance,
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
    assert measured_by(2.0, found, found + 1.0, bound) == 2.0 * MOST_WIDER[bound]
    assert measured_by(2.0, found, found + np.nan, bound) == 2.0
    assert measured_by(2.0, found, found + 1.0, TOLERANCES["bfloat16"]) == 2.0
    assert measured_by(0.0, np.zeros((0, 3)), np.zeros((0, 3)), bound) == 0.0


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


def verified(**options):
    return verify(NORMED, {"data": 4}, batches(), optimizer=optax.adamw(1e-3), devices=toy.devices(4), **options)


def errors(result, kind="gradients"):
    return {path: error for error, path in getattr(result, kind)}


def test_a_gradient_that_is_rounding_alone_is_no_difference(monkeypatch):
    result = verified()
    assert result.ok, str(result)
    assert max(errors(result).values()) < 1e-9
    monkeypatch.setattr("spmdkit.parallel.verification.rounding.MOST_WIDER", {})
    strict = verified()
    assert errors(strict)["before"] > 1e-9, "the case is one"
    assert max(error for path, error in errors(strict).items() if path != "before") < 1e-12


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
