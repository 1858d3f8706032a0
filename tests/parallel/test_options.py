"""Every option of every strategy is checked where it is made, in Python as from YAML."""

import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import Precision
from spmdkit.parallel.sharding.strategies import option_types
from spmdkit.training.optimizing.optimizer_config import OptimizerConfig


def messages(kind, **options):
    with pytest.raises(UserError) as raised:
        kind(**options)
    return str(raised.value).splitlines()


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("context.attention", "rings", "one of ring, all_to_all (Did you mean ring?)."),
        ("data.zero", 3, "at most 2."),
        ("data.zero", 1.0, "an integer."),
        ("fsdp.prefetch", True, "an integer."),
        ("fsdp.floor_bytes", -1, "at least 0."),
        ("data.outer_learning_rate", float("inf"), "a finite number."),
        ("data.outer_learning_rate", 0.0, "positive in float32."),
        ("data.outer_momentum", 1.0, "less than 1."),
        ("tensor.explicit", "yes", "true or false."),
        ("pipe.schedule", None, "a string."),
        ("pipe.layers", 3, "a list."),
    ],
)
def test_rejects_invalid_options_from_python(option, value, rule):
    strategy, name = option.split(".")
    assert messages(option_types()[strategy], **{name: value}) == [f"strategy.{option}={value!r} must be {rule}"]


def test_shows_items_of_lists_and_shortens_long_values():
    assert messages(option_types()["pipe"], layers=(1, 2.5)) == ["strategy.pipe.layers[1]=2.5 must be an integer."]
    [message] = messages(option_types()["data"], local_steps="x" * 10_000)
    assert len(message) < 100


@pytest.mark.parametrize("scale", [1e-320, 1e-40, 1e300, -1.0])
def test_rejects_loss_scales_outside_float32(scale):
    found = messages(Precision, loss_scale=scale, loss_scale_initial=scale)
    limit = "at most 3.40282e+38" if scale > 1 else "positive in float32"
    assert found == [
        f"precision.loss_scale={scale!r} must be one of auto, dynamic, none or {limit}.",
        f"precision.loss_scale_initial={scale!r} must be {limit}.",
    ]


@pytest.mark.parametrize("strategy", option_types())
def test_sizes(strategy):
    for size in (0, -2):
        message = f"strategy.{strategy}={size} must be at least 1, or -1 for the remaining devices."
        assert messages(option_types()[strategy], size=size) == [message]
    assert option_types()[strategy](size=-1).size == -1


def test_all_wrong_types_are_said_at_once_and_before_ranges():
    found = messages(option_types()["data"], size=0, zero=1.5, outer_momentum=float("nan"), local_steps=3)
    assert [line.split("=")[0] for line in found] == ["strategy.data.zero", "strategy.data.outer_momentum"]


@pytest.mark.parametrize("layers", [[1, 2], np.array([1, 2]), [np.int64(1), np.int64(2)]])
def test_accepts_numpy_integers_and_lists(layers):
    config = option_types()["pipe"](size=np.int64(2), layers=layers)
    assert (config.size, type(config.size), config.layers) == (2, int, (1, 2))
    assert {type(each) for each in config.layers} == {int}


def test_rejects_values_in_place_of_options():
    with pytest.raises(UserError, match=r"^optimizer\.ema='abc' must be a EMAConfig\.$"):
        OptimizerConfig(ema="abc")


@pytest.mark.parametrize("name", ["params", "compute", "reduce"])
def test_any_float64_needs_64_bit_types(name):
    assert Precision(**{name: "float64"}).needs_x64
    assert not Precision(**{name: "bfloat16"}).needs_x64
