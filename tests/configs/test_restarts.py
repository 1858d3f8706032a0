"""What may change at a restart is said once for every key of the schema."""

import dataclasses

import pytest
from spmdkit.configs.restarts import RULES, describe_restarts, is_fixed, rule_of
from spmdkit.configs.schema import Config
from spmdkit.configs.write import as_plain
from spmdkit.parallel.sharding.strategies import option_types


def keys(values, prefix=""):
    if not isinstance(values, dict) or not values:
        return [prefix]
    return [key for name, value in values.items() for key in keys(value, f"{prefix}.{name}" if prefix else name)]


OPTIONS = {axis: dataclasses.fields(options) for axis, options in option_types().items()}
SCHEMA = {
    *keys(as_plain(Config())),
    *(f"strategy.{axis}.{option.name}" for axis, options in OPTIONS.items() for option in options),
}


def meets(rule_key, key):
    return key == rule_key or key.startswith(f"{rule_key}.")


@pytest.mark.parametrize("key", sorted(SCHEMA))
def test_every_key_is_in_one_class(key):
    """Sections of which some keys may change and some may not name each: a new key there has to be given a class."""
    met = [rule_key for rule in RULES for rule_key in rule.keys if meets(rule_key, key)]
    assert met, f"{key} is in no class: give it one in configs/restarts.py"
    longest = max(met, key=len)
    assert met.count(longest) == 1, f"{key} is in several classes"
    assert longest in rule_of(key).keys


def test_no_class_names_a_key_that_is_not_there():
    named = [key for rule in RULES for key in rule.keys]
    assert len(set(named)) == len(named)
    assert [name for name in named if not any(meets(name, key) for key in {*SCHEMA, "model.check"})] == []


def test_options_of_a_model_are_the_model():
    assert is_fixed("model.width")
    assert is_fixed("model.lora.rank")
    assert not is_fixed("model.check")
    assert rule_of("nothing.of.the.kind") is None


def test_what_is_told_is_the_table():
    table = describe_restarts()
    assert [key for rule in RULES for key in rule.keys if f"`{key}`" not in table] == []


def test_what_the_scale_of_float16_allows():
    """`loss_scale: auto` adds a scale to the state in float16; its first value is read at step 0 alone."""
    assert rule_of("precision.compute").kind == "fits"
    assert rule_of("precision.loss_scale_initial").why.startswith("step 0 alone reads it")
    assert rule_of("precision.loss_scale_interval").kind == "forward"
