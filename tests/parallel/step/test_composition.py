"""What each device runs in a step: strategies in turn, sums over all devices, divided once, clipped, drawn by step."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.parallel import FSDPConfig, Model, lay_out
from spmdkit.parallel.plan import StepOptions
from spmdkit.parallel.step.composition import DeviceStep
from spmdkit.parallel.step.gradients import clip_factor, global_norm
from support import toy

from spmdkit import TensorLayout

WIDTH = 8
BATCH = {"x": np.arange(1.0, 5, dtype=np.float32), "weights": np.array([1, 0.5, 0, 2], np.float32)}
PARAMS = {"w": np.linspace(1, 2, WIDTH, dtype=np.float32)}


def loss(params, batch, key):
    drawn = 0.0 if key is None else jax.random.uniform(key)
    return (batch["weights"] * batch["x"]).sum() * (params["w"].sum() + drawn), batch["weights"].sum()


MODEL = Model(init=lambda key: {"w": jnp.ones(WIDTH)}, loss=loss)


@cache
def local(accumulate=1, clip_norm=0.0):
    strategy = {"data": 2, "fsdp": FSDPConfig(size=2, floor_bytes=1)}
    plan = lay_out(MODEL, strategy, devices=toy.devices(4))
    return DeviceStep(MODEL, replace(plan, options=StepOptions(accumulate=accumulate, clip_norm=clip_norm)))


@cache
def program(accumulate=1, clip_norm=0.0):
    made = local(accumulate, clip_norm)
    return jax.jit(made.mapped_gradients(made.plan.table, abstract=False))


def gradients(batch=BATCH, *, step=0, **options):
    found, metrics, *_ = program(**options)(PARAMS, batch, jnp.zeros(2, jnp.uint32), jnp.int32(step), (), (), ())
    return np.asarray(found["w"]), jax.device_get(metrics)


TOTAL = float(BATCH["weights"] @ BATCH["x"])
MEAN = TOTAL / 3.5


def test_each_step_draws_its_own_numbers():
    key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")
    for step in (0, 3):
        drawn = float(jax.random.uniform(jax.random.fold_in(key, step)))
        assert float(gradients(step=step)[1].loss) == pytest.approx(MEAN * (PARAMS["w"].sum() + drawn), rel=1e-6)


def test_rows_without_weight_divide_by_nothing():
    found, metrics = gradients({**BATCH, "weights": np.zeros(4, np.float32)})
    assert not found.any()
    assert (float(metrics.loss), float(metrics.weight), float(metrics.grad_norm)) == (0, 0, 0)


def test_clipping_scales_and_the_norm_is_that_before():
    found, metrics = gradients(clip_norm=0.5)
    assert np.linalg.norm(found) == pytest.approx(0.5, rel=1e-5)
    assert float(metrics.grad_norm) == pytest.approx(MEAN * WIDTH**0.5, rel=1e-6)


def test_an_evaluation_sums_and_draws_nothing():
    total, weight, *_ = jax.jit(local().mapped_sums())(PARAMS, BATCH, ())
    assert (float(total), float(weight)) == (pytest.approx(TOTAL * PARAMS["w"].sum(), rel=1e-6), 3.5)


def test_squares_of_narrow_gradients_are_summed_wide():
    """10,000 squares of 0.01: in bfloat16 a sum would stop early, and in float16 a square of 1e-4 is nearly nothing."""
    mesh = toy.mesh(data=1)
    for dtype, value in (("bfloat16", 2.0**-7), ("float16", 2.0**-14)):
        gradients = {"a": jnp.full((100, 100), value, dtype), "b": jnp.zeros((3,), dtype)}
        layouts = {"a": TensorLayout((None, None), mesh), "b": TensorLayout((None,), mesh)}
        norm = jax.jit(lambda gradients, layouts=layouts: global_norm(gradients, layouts, (), [], jnp.float32(4.0)))
        found = norm(gradients)
        assert found.dtype == jnp.float32
        assert float(found) == pytest.approx(100 * value / 4, rel=1e-5)


@pytest.mark.parametrize(
    ("norm", "largest", "factor"), [(2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (1.0, 1.0, 1.0), (7.0, 0.0, 1.0), (0.0, 1.0, 1.0)]
)
def test_clipping(norm, largest, factor):
    assert float(clip_factor(jnp.float32(norm), largest)) == factor
