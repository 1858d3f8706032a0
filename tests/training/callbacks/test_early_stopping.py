import math

import pytest
from play import play
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.early_stopping import EarlyStopping


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
        pytest.param([math.nan, math.nan, 1], {"patience": 2}, 4, id="what is not finite is no better"),
    ],
)
def test_where_it_ends(losses, options, stops_at):
    losses = [*losses, *[losses[-1]] * 6][:6]
    assert play(EarlyStopping(**options), losses=losses, every=2, steps=12).step == stops_at


def test_it_says_why():
    played = play(EarlyStopping(patience=2, min_delta=0.5), losses=[5, 6, 7])
    assert played.ended.reason == (
        "early stopping, for eval_loss has not fallen by more than 0.5 from 5 in 2 evaluations, since step 2"
    )


def test_it_goes_on_counting_where_the_checkpoint_was():
    losses = [5, 6, 7, 8, 9, 10]
    whole = play(EarlyStopping(patience=4), losses=losses, saves=(6,))
    resumed = play(EarlyStopping(patience=4), losses=losses, start=6, notes=whole.saved[6])
    assert (resumed.step, resumed.ended) == (whole.step, whole.ended)
    assert whole.step == 10


def test_what_has_ended_stays_so_unless_it_may_wait_longer():
    notes = play(EarlyStopping(patience=2), losses=[5, 6, 7]).saved[6]["callbacks"][0][1]
    same, longer = EarlyStopping(patience=2), EarlyStopping(patience=3)
    same.restore(notes)
    longer.restore(notes)
    assert same.finished()
    assert not longer.finished()


def test_a_metric_that_there_is_not():
    with pytest.raises(
        UserError, match=r"monitor='eval_los': an evaluation has no such metric. Did you mean eval_loss\?"
    ):
        play(EarlyStopping(monitor="eval_los"), losses=[1.0])


def test_numbers_out_of_range():
    with pytest.raises(UserError, match=r"patience=0 has to be at least 1(.|\n)*min_delta=-1 has to be at least 0"):
        EarlyStopping(patience=0, min_delta=-1)
