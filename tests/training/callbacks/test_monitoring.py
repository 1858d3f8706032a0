import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.callback import Callback, Run
from spmdkit.training.callbacks.monitoring import BEST, BestCheckpoint, EarlyStopping, ReduceOnPlateau
from spmdkit.training.callbacks.rate_factor import factors_of
from support.training import play


@pytest.mark.parametrize(
    ("losses", "options", "stops_at"),
    [
        pytest.param([5, 4, 3, 2, 1, 0], {"patience": 1}, 12, id="it gets better all the time"),
        pytest.param([5, 6, 7, 1], {"patience": 2}, 6, id="two in a row are no better"),
        pytest.param([5, 6, 4, 6, 6], {"patience": 2}, 10, id="a better one begins again"),
        pytest.param([5, 5, 5], {"patience": 2}, 6, id="the same is no better"),
        pytest.param([5, 4.9, 4.8, 4.7], {"patience": 2, "min_delta": 0.25}, 6, id="a little better is not enough"),
        pytest.param([5, 4.9, 4.7, 4.6], {"patience": 2, "min_delta": 0.25}, 10, id="little by little it is"),
        pytest.param([1, 2, 1, 1], {"patience": 2, "mode": "max"}, 8, id="more is better"),
        pytest.param([math.nan, -math.inf, 1], {"patience": 2}, 4, id="what is not finite is no better"),
    ],
)
def test_early_stopping_ends_after_patience(losses, options, stops_at):
    losses = [*losses, *[losses[-1]] * 6][:6]
    assert play(EarlyStopping(**options), losses=losses, every=2, steps=12).step == stops_at


def test_early_stopping_states_the_reason():
    played = play(EarlyStopping(patience=2, min_delta=0.5), losses=[5, 6, 7])
    assert played.ended.reason == (
        "early stopping, for eval_loss has not fallen by more than 0.5 from 5 in 2 evaluations, since step 2"
    )


def test_early_stopping_resumes_its_count():
    losses = [5, 6, 7, 8, 9, 10]
    whole = play(EarlyStopping(patience=4), losses=losses, saves=(6,))
    resumed = play(EarlyStopping(patience=4), losses=losses, start=6, notes=whole.saved[6])
    assert (resumed.step, resumed.ended) == (whole.step, whole.ended)
    assert whole.step == 10


def test_finished_run_stays_finished_unless_patience_grows():
    notes = play(EarlyStopping(patience=2), losses=[5, 6, 7]).saved[6]["callbacks"][0][1]
    same, longer = EarlyStopping(patience=2), EarlyStopping(patience=3)
    same.restore(notes)
    longer.restore(notes)
    assert same.finished()
    assert not longer.finished()


def test_requires_the_monitored_metric():
    message = r"Unknown monitor 'eval_los'; known: .* Did you mean 'eval_loss'\?"
    with pytest.raises(UserError, match=message):
        play(EarlyStopping(monitor="eval_los"), losses=[1.0])


def test_subclasses_may_have_fields_of_any_type():
    @dataclass(kw_only=True)
    class Own(EarlyStopping):
        anything: Callback | None = None
        later: "Undefined" = None  # type: ignore[name-defined] # noqa: F821

    assert Own(anything=Callback(), patience=np.int64(2)).patience == 2
    with pytest.raises(UserError, match=r"Own\.patience=0 must be at least 1"):
        Own(patience=0)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (EarlyStopping, {"patience": 0, "min_delta": -1}, "EarlyStopping.patience=0 must be at least 1.\nEarly"),
        (EarlyStopping, {"min_delta": math.nan}, "EarlyStopping.min_delta=nan must be a finite number."),
        (ReduceOnPlateau, {"factor": 1}, "ReduceOnPlateau.factor=1 must be less than 1."),
        (ReduceOnPlateau, {"factor": "half"}, "ReduceOnPlateau.factor='half' must be a number."),
        (EarlyStopping, {"patience": 2.5}, "EarlyStopping.patience=2.5 must be an integer."),
        (EarlyStopping, {"patience": True}, "EarlyStopping.patience=True must be an integer."),
    ],
)
def test_rejects_options_out_of_range(cls, options, message):
    with pytest.raises(UserError) as raised:
        cls(**options)
    assert str(raised.value).startswith(message)


def factors(losses, **options):
    """Returns the factor at each evaluation, and the last one."""
    seen = []

    class Seeing:
        def on_evaluation_begin(self, run):
            seen.append(run.learning_rate_factor)

    played = play(ReduceOnPlateau(**options), Seeing(), losses=losses, every=2, steps=2 * len(losses))
    return [*seen, *factors_of(played.state).values()]


@pytest.mark.parametrize(
    ("losses", "options", "expected"),
    [
        ([5, 4, 3, 2], {"patience": 1}, [1, 1, 1, 1, 1]),
        ([5, 5, 5, 5], {"patience": 1}, [1, 1, 0.5, 0.25, 0.125]),
        ([5, 5, 5, 5, 5], {"patience": 2, "factor": 0.25}, [1, 1, 1, 0.25, 0.25, 0.0625]),
        ([5, 5, 5, 5, 5], {"patience": 1, "cooldown": 2}, [1, 1, 0.5, 0.5, 0.5, 0.25]),
        ([5, 5, 5, 5, 5], {"patience": 1, "min_factor": 0.3}, [1, 1, 0.5, 0.3, 0.3, 0.3]),
        ([1, 2, 3, 3], {"patience": 1, "mode": "max"}, [1, 1, 1, 1, 0.5]),
    ],
)
def test_plateau_lowers_the_factor(losses, options, expected):
    assert factors(losses, **options) == pytest.approx(expected)


@pytest.mark.parametrize(("step", "cooldown", "factor"), [(4, 1, 0.25), (6, 2, 0.5)], ids=["waits", "rests"])
def test_plateau_resumes_its_count(step, cooldown, factor):
    losses, options = [5, 5, 5, 5, 5, 5], {"patience": 2, "cooldown": cooldown}
    whole = play(ReduceOnPlateau(**options), losses=losses)
    before = play(ReduceOnPlateau(**options), losses=losses, saves=(step,), steps=step)
    resumed = play(ReduceOnPlateau(**options), losses=losses, start=step, notes=before.saved[step], state=before.state)
    assert factors_of(resumed.state) == factors_of(whole.state) == {"learning_rate": factor}


def test_plateau_reports_the_new_rate():
    assert play(ReduceOnPlateau(patience=1), losses=[5, 6], steps=4).said == [
        "Step 4: eval_loss has not fallen from 5 in 1 evaluation; the learning rate is now 0.5 of its schedule."
    ]


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
def test_keeps_the_best_checkpoints(losses, options, saved, kept, tmp_path):
    played = play(BestCheckpoint(**options), losses=losses, steps=8, folder=tmp_path)
    assert (list(played.saved), played.run.kept) == (saved, kept)
    best = json.loads((tmp_path / BEST).read_text())["best"]
    assert {each["step"] for each in best} == kept
    better = sorted((each["eval_loss"] for each in best), reverse=options.get("mode") == "max")
    assert [each["eval_loss"] for each in best] == better


def test_resumed_run_keeps_its_best_checkpoints(tmp_path):
    before = play(BestCheckpoint(), losses=[3, 5, 5, 5], steps=4, saves=(4,), folder=tmp_path)
    resumed = play(BestCheckpoint(), losses=[3, 5, 5, 5], start=4, notes=before.saved[4], folder=tmp_path)
    assert (resumed.run.kept, resumed.saved) == ({2}, {})


def test_repeated_evaluation_counts_once(tmp_path):
    """After a resume from a checkpoint that was saved before its evaluation."""
    best, run = BestCheckpoint(keep=2), Run(folder=tmp_path, start=4, num_steps=8, step=4)
    best.restore({"best": [[4, 2.0], [2, 3.0]]})
    best.on_evaluation_end(run, {"eval_loss": 2.5})
    assert best.state() == {"best": [(4, 2.5), [2, 3.0]]}
    assert run.kept == {2, 4}
