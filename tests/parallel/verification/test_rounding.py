"""The tolerance of a comparison is that of the narrowest numbers anywhere in a program."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from spmdkit.parallel.verification.rounding import TOLERANCES, tolerance, width


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
