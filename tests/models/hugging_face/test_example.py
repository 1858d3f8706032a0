"""examples/fine_tune.py: it learns, and what it writes loads with the weights that it has learned."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from spmdkit.models.hugging_face import load

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "fine_tune.py"


@pytest.mark.slow
def test_fine_tuning(tmp_path):
    spec = importlib.util.spec_from_file_location("fine_tune", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = example.fine_tune(tmp_path / "first", tmp_path / "second")
    assert losses[-1] < losses[0] - 0.5
    first, second = load(tmp_path / "first"), load(tmp_path / "second")
    assert second.config == first.config
    moved = np.abs(np.asarray(second.params["blocks"]["mlp"]["up"]) - np.asarray(first.params["blocks"]["mlp"]["up"]))
    assert 1e-3 < moved.max() < 0.2
