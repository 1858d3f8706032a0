"""The section `callbacks`: names, options, and what is told of mistakes."""

import pytest
from runs import write_config
from spmdkit.configs import ConfigError, load_config, resolved_yaml


def loaded(folder, given):
    return load_config(write_config(folder, callbacks=given)).callbacks


def test_options_are_filled_in(tmp_path):
    csv, early, own = loaded(
        tmp_path, ["csv", {"name": "early_stopping", "patience": 7}, {"name": "mine:make", "width": [1, 2]}]
    )
    assert csv == {"name": "csv", "path": "metrics.csv"}
    assert early == {"name": "early_stopping", "monitor": "eval_loss", "patience": 7, "min_delta": 0.0, "mode": "min"}
    assert own == {"name": "mine:make", "width": [1, 2]}


def test_none_by_default_and_in_an_override(tmp_path):
    assert load_config("quickstart").callbacks == ()
    assert load_config("quickstart", ["callbacks=[csv]"]).callbacks == ({"name": "csv", "path": "metrics.csv"},)


def test_it_loads_back_equal(tmp_path):
    config = load_config(write_config(tmp_path, callbacks=["csv", {"name": "time_limit", "after": "3h"}]))
    file = tmp_path / "resolved.yaml"
    file.write_text(resolved_yaml(config))
    assert load_config(file) == config


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("csv", "callbacks must be a list such as [csv, {name: early_stopping, patience: 3}], not 'csv' (text)."),
        ([3], "callbacks.0 must be a name or a mapping with a name, as in [csv, "),
        ([{"patience": 3}], "callbacks.0 must be a name or a mapping with a name"),
        (["early_stoping"], "or your own as module:function, not 'early_stoping' (text). Did you mean early_stopping?"),
        ([{"name": 3}], "or your own as module:function, not 3 (a whole number)."),
        (["csv", {"name": "csv", "file": "x"}], "callbacks.1.file is not a key. The keys here: path."),
        ([{"name": "early_stopping", "patience": "x"}], "callbacks.0.patience must be a whole number, not 'x' (text)."),
        ([{"name": "early_stopping", "patience": 0}], "callbacks.0.patience=0 has to be at least 1, and finite."),
        ([{"name": "early_stopping", "mode": "less"}], "callbacks.0.mode must be one of min, max"),
        (["time_limit"], "callbacks.0.after must be given."),
        ([{"name": "time_limit", "after": "3"}], "callbacks.0.after='3' is no time: write '3h', "),
        ([{"name": "os:system", "command": "touch here"}], "callbacks.0.name='os:system' would import os, which is "),
    ],
)
def test_mistakes(given, text, tmp_path):
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, given)
    (problem,) = error.value.problems
    assert text in problem
    assert problem.startswith("line ")
