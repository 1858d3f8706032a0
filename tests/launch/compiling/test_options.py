"""What XLA is told of a step, and that this XLA knows it."""

import jax
import pytest
from spmdkit.launch.compiling.options import PRESETS, XlaOptions, xla_options
from spmdkit.mesh.errors import UserError


def test_a_cpu_is_told_nothing():
    assert xla_options("default", "cpu", flags="") == XlaOptions({}, {})
    assert str(xla_options("default", "cpu", flags="")) == "no options of XLA"


def test_a_preset_is_for_its_platform_and_gives_way_to_XLA_FLAGS():
    assert xla_options("default", "cuda", flags="").used == PRESETS["cuda"]
    found = xla_options("default", "cuda", flags="--xla_gpu_enable_latency_hiding_scheduler=false")
    assert found.used == {"xla_gpu_enable_while_loop_double_buffering": True}
    assert found.left_out == {"xla_gpu_enable_latency_hiding_scheduler": "XLA_FLAGS names it"}
    assert xla_options("none", "cuda", flags="").used == {}


def test_this_XLA_knows_every_option_of_the_presets():
    for options in PRESETS.values():
        jax.jit(lambda x: x + 1).lower(0.0).compile(compiler_options=dict(options))


def test_values_are_what_they_look_like_and_other_platforms_are_left_out():
    given = ("--xla_cpu_enable_fast_math=false", "xla_gpu_autotune_level=0", "xla_backend_optimization_level=1")
    jax.devices()
    assert xla_options(given, "cpu", flags="").used == {
        "xla_cpu_enable_fast_math": False,
        "xla_backend_optimization_level": 1,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("xla_nope=1", r"run.xla: XLA of jaxlib [\d.]+ does not know xla_nope; take it out, or find its new name"),
        ("xla_cpu_enable_fast_math=often", "run.xla: xla_cpu_enable_fast_math: .*'often' is not a valid bool value"),
    ],
)
def test_what_XLA_does_not_know(given, message):
    jax.devices()
    with pytest.raises(UserError, match=message):
        xla_options((given, "xla_cpu_enable_fast_min_max=true"), "cpu", flags="")
