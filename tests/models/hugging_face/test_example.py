"""examples/fine_tune.py: it learns, and what it writes loads with the weights that it has learned."""

import numpy as np
import pytest
from spmdkit.models.hugging_face import load
from support.runs import example


@pytest.mark.slow
def test_fine_tuning(tmp_path):
    losses = example("fine_tune").fine_tune(tmp_path / "first", tmp_path / "second")
    assert losses[-1] < losses[0] - 0.5
    first, second = load(tmp_path / "first"), load(tmp_path / "second")
    assert second.config == first.config
    moved = np.abs(np.asarray(second.params["blocks"]["mlp"]["up"]) - np.asarray(first.params["blocks"]["mlp"]["up"]))
    assert 1e-3 < moved.max() < 0.2
