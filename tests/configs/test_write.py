import pytest
import yaml
from spmdkit.configs import describe_config, load_config, resolved_yaml
from spmdkit.configs.presets import preset_names
from spmdkit.configs.reading.reader import read_yaml
from spmdkit.configs.schema import Config
from spmdkit.configs.write import as_plain


def loaded_back(config: Config, tmp_path) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    return load_config(path)


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_back_equal(name, tmp_path):
    config = load_config(name)
    assert loaded_back(config, tmp_path) == config


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
    assert loaded_back(config, tmp_path) == config
    assert yaml.safe_load(resolved_yaml(config)) == as_plain(config)


def test_every_key_is_written():
    value = read_yaml(resolved_yaml(load_config("quickstart"))).value
    assert {"dir", "root", "allow", "seed", "simulate", "log_every", "cache", "xla"} == set(value["run"])
    assert {"size", "floor_bytes"} <= set(value["strategy"]["fsdp"])
    assert {"run", "model", "data", "optimizer", "strategy", "layouts", "train", "precision", "eval"} <= set(value)


def test_reference_of_all_keys():
    text = describe_config()
    for line in ("  steps: 100", "  learning_rate: ", "  floor_bytes: 16384", "strategy.fsdp: ", "  prompt: 'def '"):
        assert f"\n{line}" in text
    assert "model: (name: transformer)" in text
    assert "\noptimizer.groups.<pattern>: What differs for the parameters of a group" in text
    assert "\nmodel.lora: Low-rank matrices" in text
    assert "\n  check: error                      (one of error, warn, off)\n" in text
    assert "Optimizer steps in the whole run, those before a resume included." in text
    assert max(map(len, text.splitlines())) <= 130
