"""Every option of every strategy is checked where it is made, in Python as from YAML."""

from dataclasses import fields
from typing import Literal, get_origin

import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.parallel.sharding.strategies import option_types, read_strategy

OPTIONS = [(strategy, field) for strategy, kind in option_types().items() for field in fields(kind)]
WRONG = {
    int: ([2.5, "4", True, None, float("nan"), [1]], "must be an integer"),
    float: ([float("nan"), float("inf"), "0.7", True, None], "must be a finite number"),
    bool: ([1, "yes", None], "must be a boolean"),
    str: ([1, None, b"1f1b"], "must be a string"),
    tuple: (["12", 3, (1, 2.0), (True,), None], "must be a list of integers"),
    Literal: (["groupz", "", 1, None, ["ring"]], ": the choices are "),
}


def messages(kind, **options):
    with pytest.raises(UserError) as raised:
        kind(**options)
    return str(raised.value).splitlines()


@pytest.mark.parametrize(("strategy", "field"), OPTIONS, ids=lambda each: getattr(each, "name", each))
def test_types(strategy, field):
    values, rule = WRONG[get_origin(field.type) or field.type]
    for value in values:
        (message,) = messages(option_types()[strategy], **{field.name: value})
        assert message.startswith(f"strategy.{strategy}.{field.name}={value!r}{'' if rule[0] == ':' else ' '}{rule}")


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("context.send", "groupz", ": the choices are pairs, groups. Did you mean groups?"),
        ("pipe.embed_and_head", "splitt", ": the choices are whole, split. Did you mean split?"),
        ("fsdp.floor_bytes", -1, " must be at least 0 bytes: 0 splits every parameter."),
        ("data.floor_bytes", -1, " must be at least 0 bytes: 0 splits every parameter."),
        ("data.zero", "1", " must be an integer."),
        ("data.outer_learning_rate", -0.5, " must be more than 0, and finite."),
        ("data.outer_momentum", 1.0, " must be at least 0 and less than 1."),
    ],
)
def test_messages(option, value, rule):
    strategy, name = option.split(".")
    assert messages(option_types()[strategy], **{name: value}) == [f"strategy.{option}={value!r}{rule}"]


@pytest.mark.parametrize("strategy", option_types())
def test_sizes(strategy):
    for size in (0, -2):
        message = f"strategy.{strategy}={size} must be at least 1, or -1 for the remaining devices."
        assert messages(option_types()[strategy], size=size) == [message]
    assert option_types()[strategy](size=-1).size == -1


def test_all_wrong_types_are_said_at_once_and_before_ranges():
    found = messages(option_types()["data"], size=0, zero=1.0, outer_momentum=float("nan"), local_steps=-1)
    assert [line.split("=")[0] for line in found] == ["strategy.data.zero", "strategy.data.outer_momentum"]


def test_mappings_are_checked_alike():
    with pytest.raises(UserError, match=r"strategy\.tensor\.collective_matmul='no' must be a boolean\."):
        read_strategy({"tensor": {"size": 2, "collective_matmul": "no"}})


def test_a_long_value_is_cut():
    (message,) = messages(option_types()["fsdp"], keep="x" * 1000)
    assert len(message) < 150


def test_whole_numbers_and_lists_of_other_libraries_are_taken():
    config = option_types()["pipe"](size=np.int64(2), layers=[np.int32(1), 2])
    assert (config.size, type(config.size), config.layers) == (2, int, (1, 2))
    assert hash(config) == hash(option_types()["pipe"](size=2, layers=(1, 2)))
