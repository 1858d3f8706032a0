import pytest
from spmdkit.configs import load_config
from spmdkit.configs.presets import PRESETS, preset_names, preset_summary
from spmdkit.configs.reading.reader import read_yaml
from spmdkit.configs.schema import Config
from spmdkit.configs.write import as_plain

NAMES = preset_names()


def test_which_there_are():
    assert {"quickstart", "data_parallel", "fsdp", "hsdp", "mlp"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_loads(name):
    assert load_config(name).run.dir == f"runs/{name}"


@pytest.mark.parametrize("name", NAMES)
def test_is_short_and_has_a_header(name):
    lines = (PRESETS / f"{name}.yaml").read_text().splitlines()
    assert len(lines) <= 30
    assert f"spmdkit train {name}" in lines[0]
    assert any(line.startswith("# expect: ") for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_its_second_line_says_what_it_shows(name):
    summary = preset_summary(name)
    assert summary[0].isupper()
    assert summary.endswith(".")
    assert len(summary) <= 103


@pytest.mark.parametrize("name", NAMES)
def test_holds_only_differences(name):
    """No key repeats its default; `model.name` and sizes of the strategy may, for they are what a preset is about."""
    defaults, given = as_plain(Config()), read_yaml((PRESETS / f"{name}.yaml").read_text()).value
    repeated = [
        f"{section}.{key}"
        for section, values in given.items()
        if section not in ("model", "strategy")
        for key, value in values.items()
        if defaults[section].get(key) == value
    ]
    assert repeated == []
