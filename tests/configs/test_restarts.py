"""Every key of the schema has exactly one rule for restarts."""

import dataclasses

import pytest
from spmdkit.configs.config_text import as_plain
from spmdkit.configs.restarts import RULES, describe_restarts, rule_of
from spmdkit.configs.schema import Config
from spmdkit.layouts.paths import flatten_mapping
from spmdkit.parallel.sharding.strategies import option_types

OPTIONS = {axis: dataclasses.fields(options) for axis, options in option_types().items()}
SCHEMA = {
    *flatten_mapping(as_plain(Config())),
    *(f"strategy.{axis}.{option.name}" for axis, options in OPTIONS.items() for option in options),
}


def covers(rule_key, key):
    return key == rule_key or key.startswith(f"{rule_key}.")


@pytest.mark.parametrize("key", sorted(SCHEMA))
def test_every_key_has_one_rule(key):
    """In a section with several rules, every key must be listed."""
    met = [rule_key for rule in RULES for rule_key in rule.keys if covers(rule_key, key)]
    assert met, f"{key} has no rule: add one in configs/restarts.py"
    longest = max(met, key=len)
    assert met.count(longest) == 1, f"{key} has several rules"
    assert longest in rule_of(key).keys


def test_rules_name_existing_keys():
    named = [key for rule in RULES for key in rule.keys]
    assert len(set(named)) == len(named)
    assert [name for name in named if not any(covers(name, key) for key in {*SCHEMA, "model.check"})] == []


def test_options_of_a_model_are_fixed():
    rules = [rule_of(key) for key in ("model.width", "model.lora.rank", "model.check")]
    assert [rule and rule.kind for rule in rules] == ["never", "never", "any"]
    assert rule_of("nothing.of.the.kind") is None
    named = {key for rule in RULES if rule.kind == "fits" for key in rule.keys}
    fits = {key for key in named if key.startswith(("train.", "strategy."))}
    assert fits == {"train.not_finite", "strategy.data.compress", "strategy.data.local_steps"}


def test_description_lists_every_key():
    table = describe_restarts()
    assert [key for rule in RULES for key in rule.keys if f"`{key}`" not in table] == []


def test_loss_scale_has_its_own_rules():
    """`loss_scale: auto` adds a scale to the state in float16; only step 0 uses its initial value."""
    assert rule_of("precision.compute").kind == "fits"
    assert rule_of("precision.loss_scale_initial").why.startswith("only step 0 uses it")
    assert rule_of("precision.loss_scale_interval").kind == "forward"
