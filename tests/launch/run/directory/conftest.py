"""A config that names code of a user's own; lets the tests of this folder import what stands beside them."""

import sys
from pathlib import Path

import pytest
from runs import write_config

sys.path.insert(0, str(Path(__file__).parent))

from user_code import LAYERS, MODEL, OPTIMIZER, OWN


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    for name, text in zip(OWN, (MODEL, LAYERS, OPTIMIZER), strict=True):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "stranger.py").write_text("import os")
    monkeypatch.syspath_prepend(tmp_path)
    return write_config(
        tmp_path,
        model={"name": "model_of_mine:make"},
        optimizer={"name": "optimizer_of_mine:make", "learning_rate": 0.01},
        strategy={"data": 8},
    )
