"""A CNN with batch norm on real images: to an accuracy, and in two phases."""

import numpy as np
import pytest
from spmdkit.checkpoints.restore import StoredCheckpoint
from spmdkit.launch.cli import main
from spmdkit.training.metrics import read_metrics
from support.runs import EXAMPLES

pytestmark = [pytest.mark.usefixtures("broadcasting"), pytest.mark.slow]


@pytest.mark.long
def test_digits_reach_the_documented_accuracy(tmp_path):
    assert main(["train", str(EXAMPLES / "digits_cnn.yaml"), f"run.dir={tmp_path}"]) == 0
    assert list(read_metrics(tmp_path / "metrics.jsonl"))[-1]["eval_accuracy"] > 0.98


@pytest.mark.long
def test_unfreezes_convolutions_at_a_plateau(tmp_path, capsys):
    """No loss is lower by 10, so they train after the second evaluation, at step 10, also in a resumed run."""
    callback = 'callbacks=[{name: "unfreeze:on_plateau", min_delta: 10}]'
    words = ["train", str(EXAMPLES / "unfreeze.yaml"), f"run.dir={tmp_path}", callback, "eval.every=5"]
    for steps in (15, 20):
        assert main([*words, "checkpoint.every=5", "checkpoint.keep=9", f"train.steps={steps}"]) == 0
    assert capsys.readouterr().out.count("backbone trains from here on") == 1
    stored = {step: StoredCheckpoint(tmp_path / "checkpoints" / str(step)) for step in (5, 10, 15, 20)}

    def moved(path, first, then):
        return not np.array_equal(*(stored[step].read([path])[path] for step in (first, then)))

    body = [path for path in stored[5].arrays if path.startswith(("params/Conv", "params/BatchNorm"))]
    assert len(body) == 6
    assert not any(moved(path, 5, 10) for path in body)
    assert all(moved(path, 10, 15) and moved(path, 15, 20) for path in body)
    assert moved("params/head/kernel", 5, 10)
    factor = next(path for path in stored[5].arrays if path.endswith("backbone"))
    assert [float(stored[step].read([factor])[factor]) for step in stored] == pytest.approx([0, 0.3, 0.3, 0.3])
