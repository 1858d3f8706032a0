import pytest
from play import play
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.plateau import ReduceOnPlateau
from spmdkit.training.callbacks.rate_factor import factor_of


def factors(losses, **options):
    """The factor with which each evaluation's step was trained, and the last one."""
    seen = []

    class Seeing:
        def on_evaluation_begin(self, run):
            seen.append(run.learning_rate_factor)

    played = play(ReduceOnPlateau(**options), Seeing(), losses=losses, every=2, steps=2 * len(losses))
    return [*seen, factor_of(played.state)]


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
def test_the_factor(losses, options, expected):
    assert factors(losses, **options) == pytest.approx(expected)


def test_it_goes_on_where_the_checkpoint_was():
    losses, options = [5, 5, 5, 5, 5, 5], {"patience": 2, "cooldown": 1}
    whole = play(ReduceOnPlateau(**options), losses=losses, saves=(6,))
    before = play(ReduceOnPlateau(**options), losses=losses, saves=(6,), steps=6)
    resumed = play(ReduceOnPlateau(**options), losses=losses, start=6, notes=before.saved[6], state=before.state)
    assert factor_of(resumed.state) == factor_of(whole.state) == 0.25


def test_it_says_so():
    assert play(ReduceOnPlateau(patience=1), losses=[5, 6], steps=4).said == [
        "Step 4: eval_loss has not fallen from 5 in 1 evaluation; the learning rate is now 0.5 of its schedule."
    ]


def test_numbers_out_of_range():
    with pytest.raises(UserError, match=r"factor=1 has to be over 0 and less than 1\."):
        ReduceOnPlateau(factor=1)
