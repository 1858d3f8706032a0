import json

import pytest
from play import play
from spmdkit.training.callbacks.best_checkpoint import NAME, BestCheckpoint
from spmdkit.training.callbacks.run import Run


@pytest.mark.parametrize(
    ("losses", "options", "saved", "kept"),
    [
        ([5, 4, 6, 3], {}, [2, 4, 8], {8}),
        ([5, 4, 6, 3], {"keep": 2}, [2, 4, 8], {4, 8}),
        ([1, 2, 3, 4], {"keep": 3}, [2, 4, 6], {2, 4, 6}),
        ([5, 4, 6, 3], {"mode": "max"}, [2, 6], {6}),
        ([5, 5, 5, 5], {}, [2], {2}),
        ([float("nan"), 5, 6, 7], {}, [4], {4}),
    ],
)
def test_what_is_saved_and_kept(losses, options, saved, kept, tmp_path):
    played = play(BestCheckpoint(**options), losses=losses, steps=8, folder=tmp_path)
    assert (list(played.saved), played.run.kept) == (saved, kept)
    best = json.loads((tmp_path / NAME).read_text())["best"]
    assert {each["step"] for each in best} == kept
    better = sorted((each["eval_loss"] for each in best), reverse=options.get("mode") == "max")
    assert [each["eval_loss"] for each in best] == better


def test_it_keeps_what_it_kept_before(tmp_path):
    before = play(BestCheckpoint(), losses=[3, 5, 5, 5], steps=4, saves=(4,), folder=tmp_path)
    resumed = play(BestCheckpoint(), losses=[3, 5, 5, 5], start=4, notes=before.saved[4], folder=tmp_path)
    assert (resumed.run.kept, resumed.saved) == ({2}, {})


def test_a_step_that_is_evaluated_again_counts_once(tmp_path):
    """As after a resume from a checkpoint that was saved before its evaluation was noted."""
    best, run = BestCheckpoint(keep=2), Run(folder=tmp_path, start=4, num_steps=8, step=4)
    best.restore({"best": [[4, 2.0], [2, 3.0]]})
    best.on_evaluation_end(run, {"eval_loss": 2.5})
    assert best.state() == {"best": [(4, 2.5), (2, 3.0)]}
    assert run.kept == {2, 4}
