"""What is not finite ends the training, or is left out, so many steps in a row."""

import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.mesh.exit_codes import DIVERGED
from spmdkit.parallel.diloco import Copies
from spmdkit.training.loop import run_steps
from spmdkit.training.steps.late_log import RUN_AHEAD
from spmdkit.training.steps.not_finite import Diverged
from support.training import PretendStep, first_state


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_divergence_names_the_step_and_stops_before_a_pause(loss):
    step, paused, reported = PretendStep(losses={6: loss}, norms={6: np.inf}), [], []
    with pytest.raises(Diverged, match=r"Step 6: the loss is (nan|inf) .*Lower optimizer\.learning_rate") as info:
        run_steps(
            step,
            first_state(),
            [{}] * 20,
            log_every=1,
            pause_at=lambda number: number in (4, 7),
            on_pause=lambda number, state: paused.append(number) or {},
            after_pause=lambda number, state: paused.append(number),
            on_progress=lambda progress: reported.append(progress.step),
        )
    assert info.value.exit_code == DIVERGED
    assert paused == [4, 4]
    assert reported == [1, 2, 3, 4, 5]
    assert step.started[-1] <= 6 + RUN_AHEAD


def test_skips_up_to_the_maximum_in_a_row():
    step, reported, told = PretendStep(losses={3: np.nan, 4: np.nan, 6: np.inf}), [], []
    options = {"log_every": 1, "on_progress": reported.append, "most_skipped": 2}
    run_steps(step, first_state(), [{}] * 8, on_skip=lambda number, found: told.append((number, found)), **options)
    assert [progress.step for progress in reported] == [1, 2, 5, 7, 8]
    assert [progress.extra.get("skipped") for progress in reported] == [None, None, 2.0, 3.0, 3.0]
    assert [number for number, _ in told] == [3, 4, 6]
    assert told[0][1] == "the loss is nan and the norm of the gradients 1.0"


def test_ends_after_more_than_the_maximum_in_a_row():
    step = PretendStep(norms={3: np.nan, 4: np.nan, 5: np.nan})
    with pytest.raises(Diverged, match=r"Step 5: .*norm of the gradients nan\. It is number 3 in a row, of at most 2"):
        run_steps(step, first_state(), [{}] * 8, most_skipped=2)


NAN = {"w": jnp.full((2,), np.nan)}
"""The last update of local steps shows in a group's copy alone, and a running mean only in the model's state."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": NAN}, "the parameters are not finite"),
        ({"model_state": {"mean": jnp.full((2,), np.inf)}}, "the model's state is not finite"),
        ({"extra": Copies(NAN, {"w": jnp.zeros(2)})}, r"what strategy\.data .*\(TrainState\.extra\.copies\) is not"),
    ],
)
def test_detects_a_non_finite_state_before_a_pause_or_stop(changes, message):
    step, paused = PretendStep(), []

    def call(state, batch):
        state, metrics = step(state, batch)
        return (state._replace(**changes) if int(state.step) == 4 else state), metrics

    with pytest.raises(Diverged, match=f"Step 4: {message}"):
        run_steps(
            call,  # pyright: ignore[reportArgumentType]
            first_state(),
            [{}] * 4,
            pause_at=lambda number: number % 2 == 0,
            on_pause=lambda number, state: paused.append(number) or {},
            after_pause=lambda number, state: paused.append(number),
        )
    assert paused == [2, 2]
    with pytest.raises(Diverged, match=f"Step 4: {message}"):
        run_steps(
            call,  # pyright: ignore[reportArgumentType]
            first_state(),
            [{}] * 6,
            may_start=lambda number: number < 5,
            on_stop=lambda number, state: paused.append(number),
        )
    assert paused == [2, 2]


def message_of(step, **options):
    with pytest.raises(Diverged) as caught:
        run_steps(step, first_state(), [{}] * 8, **options)
    return str(caught.value)


def test_a_loss_that_was_never_finite_is_blamed_on_the_data():
    for most_skipped in (0, 2):
        step = PretendStep(losses=dict.fromkeys(range(1, 9), np.nan))
        message = message_of(step, most_skipped=most_skipped)
        assert message.startswith(f"Step {most_skipped + 1}: the loss is nan")
        assert "No update was made before it, so the learning rate is not the cause. Inputs or targets" in message
        assert "Lower optimizer.learning_rate" not in message


def test_a_loss_that_is_not_finite_beside_finite_gradients_is_blamed_on_the_data():
    assert "so the parameters are not the cause. Inputs or" in message_of(PretendStep(losses={3: np.nan}))
    for step in (PretendStep(losses={3: np.nan}, norms={3: np.nan}), PretendStep(losses={3: np.inf})):
        assert "Lower optimizer.learning_rate" in message_of(step)
