"""Every option of every strategy is checked where it is made, in Python as from YAML."""

import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.parallel.sharding.strategies import option_types


def messages(kind, **options):
    with pytest.raises(UserError) as raised:
        kind(**options)
    return str(raised.value).splitlines()


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("context.attention", "rings", "'ring' or 'all_to_all'."),
        ("data.zero", 3, "0, 1 or 2."),
        ("fsdp.prefetch", 2, "0 or 1."),
        ("fsdp.floor_bytes", -1, "greater than or equal to 0."),
        ("data.floor_bytes", 2.5, "a valid integer."),
        ("data.local_steps", True, "a valid integer."),
        ("data.outer_learning_rate", float("inf"), "a finite number."),
        ("data.outer_learning_rate", 0.0, "greater than 0."),
        ("data.outer_momentum", 1.0, "less than 1."),
        ("tensor.explicit", "yes", "a valid boolean."),
        ("pipe.schedule", None, "a valid string."),
        ("pipe.layers", (1, 2.5), "a valid integer."),
    ],
)
def test_rejects_invalid_values(option, value, rule):
    strategy, name = option.split(".")
    assert messages(option_types()[strategy], **{name: value}) == [f"strategy.{option}={value!r} must be {rule}"]


@pytest.mark.parametrize("strategy", option_types())
def test_sizes(strategy):
    for size in (0, -2):
        message = f"strategy.{strategy}={size} must be at least 1, or -1 for the remaining devices."
        assert messages(option_types()[strategy], size=size) == [message]
    assert option_types()[strategy](size=-1).size == -1


def test_all_wrong_types_are_said_at_once_and_before_ranges():
    found = messages(option_types()["data"], size=0, zero=1.5, outer_momentum=float("nan"), local_steps=3)
    assert [line.split("=")[0] for line in found] == ["strategy.data.zero", "strategy.data.outer_momentum"]


def test_accepts_numpy_integers_and_lists():
    config = option_types()["pipe"](size=np.int64(2), layers=[1, 2])
    assert (config.size, type(config.size), config.layers) == (2, int, (1, 2))
