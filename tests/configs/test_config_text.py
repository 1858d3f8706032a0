"""Resolved YAML, the reference of all keys and the JSON schema."""

import dataclasses

import jsonschema
import pytest
import yaml
from spmdkit.configs import describe_config, load_config, resolved_yaml
from spmdkit.configs.config_sources import preset_names, preset_text, starter_text
from spmdkit.configs.config_text import as_plain, config_schema, field_help
from spmdkit.configs.key_names import sections
from spmdkit.configs.schema import Config, ModelCheck
from spmdkit.configs.validation import make_adapter
from spmdkit.configs.yaml_reader import read_yaml
from spmdkit.models.catalog import MODELS
from spmdkit.parallel.sharding.strategies import option_types
from spmdkit.training.callbacks.callback_catalog import CALLBACKS


def reload(config: Config, tmp_path) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    return load_config(path)


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_back_equal(name, tmp_path):
    config = load_config(name)
    assert reload(config, tmp_path) == config


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.learning_rate=1e-5",
        'run.dir="3e-4"',
        'run.dir="on"',
        'run.dir="010"',
        'run.dir="2001-01-01"',
        'run.dir="2024"',
        "sample.prompt=\"def f(x):\\n\\t# 'it'\"",
        "strategy={fsdp: {size: -1, floor_bytes: 0}, data: 2}",
        "layouts.rules={'a.*/[bc]': [fsdp, null, [data, fsdp]]}",
        "model={name: 'mine:make', width: [1, 2], table: {a: 1e-3}}",
        'optimizer={freeze: ["embed/.*"], groups: {"head/.*": {name: sgd, momentum: 0.5}}}',
        "model={name: transformer, lora: {rank: 2, match: [blocks/.*]}}",
        "model={name: 'mine:make', width: 3, lora: {match: [w]}}",
        'data={source: text, files: ["a: b", "*.txt"]}',
        'data.layout={".*": [[data, fsdp], null]}',
        "run.xla=[xla_gpu_autotune_level=2]",
    ],
)
def test_values_load_back_equal(override, tmp_path):
    config = load_config("quickstart", [override])
    assert reload(config, tmp_path) == config
    assert yaml.safe_load(resolved_yaml(config)) == as_plain(config)


def test_resolved_yaml_contains_every_key():
    value = read_yaml(resolved_yaml(load_config("quickstart"))).value
    assert tuple(value) == sections()
    assert set(value["run"]) == {"dir", "root", "allow", "seed", "simulate", "log_every", "cache", "xla"}
    assert {"size", "floor_bytes"} <= set(value["strategy"]["fsdp"])


def test_reference_lists_keys_with_types_defaults_and_help():
    text = describe_config()
    for line in ("  steps: 100 ", "  learning_rate: ", "  floor_bytes: 16384 ", "strategy.fsdp: ", "  prompt: 'def '"):
        assert f"\n{line}" in text
    for line in (
        "  check: error                      (one of error, warn, off)",
        "  seed: 0                           (an integer, at least 0, at most 4294967295)",
        "  betas: null                       (a list of 2 values or null)",
        "  epsilon: null                     (a positive number or null)",
        "  rope_base: 10000.0                (a number, above 1)",
        "  after:                            (a string)",
        "  files: []                         (a list of strings)",
        "  mixture: []                       (a list of mappings)",
        "model: (name: transformer)",
    ):
        assert f"\n{line}\n" in text
    assert "\noptimizer.groups.<pattern>: " in text
    assert "\nmodel.lora: Low-rank matrices" in text
    assert "Optimizer steps of the whole run, including those before a resume." in text
    assert max(map(len, text.splitlines())) <= 130


@dataclasses.dataclass
class Documented:
    """A class."""

    first: int = 1
    """Two
    lines."""
    second: int = 2
    third: int = 3
    """Third."""


@dataclasses.dataclass
class Derived(Documented):
    """Another class."""

    first: int = 3
    """First again."""


def test_reads_help_of_fields_and_bases():
    assert field_help(Documented) == {"first": "Two lines.", "third": "Third."}
    assert field_help(Derived) == {"first": "First again.", "third": "Third."}


def option_classes():
    found = [ModelCheck, *CALLBACKS.values(), *option_types().values(), *(options for options, _ in MODELS.values())]
    found += [type(value) for value in vars(Config()).values() if dataclasses.is_dataclass(value)]
    return found


@pytest.mark.parametrize("cls", option_classes(), ids=lambda cls: cls.__name__)
def test_every_key_has_help(cls):
    schema = make_adapter(cls).json_schema()
    for definition in schema.get("$defs", {cls.__name__: schema}).values():
        subsections = {name for name, field in definition["properties"].items() if "$ref" in field}
        documented = {name for name, field in definition["properties"].items() if "description" in field}
        inherited = field_help(cls) if definition["title"] == cls.__name__ else {}
        assert definition["properties"].keys() - subsections <= documented | set(inherited), definition["title"]


@pytest.fixture(scope="module")
def validator():
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_json_schema_accepts_every_preset(validator):
    for text in (
        starter_text(),
        *map(preset_text, preset_names()),
        resolved_yaml(load_config("quickstart", ["callbacks=[csv]"])),
    ):
        assert [error.message for error in validator.iter_errors(read_yaml(text).value)] == []


VALID = [
    "train: {steps: 100}",
    "train:",
    "strategy: fsdp",
    "strategy: {fsdp: {size: 4, floor_bytes: 64KiB}, data: -1}",
    "model: {name: 'mine:make', width: 3}",
    "model: {layers: 3, lora: {match: [a]}}",
    "callbacks: [csv, {name: early_stopping, patience: 3}, 'mine:make', {name: 'mine:make', x: 1}]",
    "optimizer: {groups: {head/.*: {learning_rate: 1e-4}}}",
]
INVALID = [
    "train: {steps: ten}",
    "train: {steps: 0}",
    "train: {stps: 1}",
    "trian: {}",
    "strategy: fsd",
    "strategy: {fsdp: {floor_bytes: big}}",
    "model: {name: mlp, layers: 3}",
    "optimizer: {learning_rate: 0}",
    "callbacks: [early_stoping]",
    "callbacks: [{name: early_stopping, patiens: 3}]",
    "callbacks: [{name: time_limit}]",
    "optimizer: {groups: {head/.*: {lr: 1e-4}}}",
]


@pytest.mark.parametrize("text", [*VALID, *INVALID])
def test_json_schema_accepts_only_valid_configs(text, validator):
    assert validator.is_valid(read_yaml(text).value) == (text in VALID)
