"""The loop alone with a step that only pretends, then the real one from plain Python."""

from types import SimpleNamespace

import numpy as np
import optax
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.models.mlp import MLPConfig, mlp
from spmdkit.parallel.model.loss_sums import LossSums
from spmdkit.training.loop import StepLeftOut, evaluate, run_steps
from support import toy
from support.training import PretendStep, first_state

import spmdkit

ROWS, FEATURES, CLASSES = 16, 8, 4


def test_a_pause_comes_when_all_is_done_and_before_the_next_step():
    step, seen = PretendStep(), []

    def on_pause(number, state):
        seen.append(("pause", number, int(state.step), step.started[-1], step.awaited[-1][0]))
        return {"eval_loss": 7.0}

    run_steps(
        step,
        first_state(),
        [{}] * 5,
        log_every=2,
        pause_at=lambda number: number == 3,
        on_pause=on_pause,
        on_progress=lambda progress: seen.append(("report", progress.step, progress.extra)),
        after_pause=lambda number, state: seen.append(("after", number, int(state.step), step.started[-1])),
    )
    assert seen == [
        ("report", 2, {}),
        ("pause", 3, 3, 3, 3),
        ("report", 3, {"eval_loss": 7.0}),
        ("after", 3, 3, 3),
        ("report", 4, {}),
        ("report", 5, {}),
    ]


@pytest.mark.parametrize("batches", [[{}] * 3, iter([{}] * 3)])
def test_batches_that_end_before_the_last_step_are_an_error(batches):
    with pytest.raises(UserError, match=r"The batches ended after step 5 of 10, and neither a callback nor a signal"):
        run_steps(PretendStep(), first_state(), batches, start=2, last=10)


def test_a_stop_before_the_last_step_is_no_error():
    stopped = []
    run_steps(
        PretendStep(),
        first_state(),
        [{}] * 3,
        last=10,
        may_start=lambda number: number < 3,
        on_stop=lambda number, state: stopped.append(number),
    )
    assert stopped == [2]


# From plain Python, with arrays in memory.


BATCH = toy.labelled(np.random.default_rng(0), ROWS, FEATURES, classes=CLASSES, dtype="float32")


@pytest.fixture(scope="module")
def model():
    return mlp(MLPConfig(features=FEATURES, classes=CLASSES, widths=(16,)))


def test_evaluation_reads_the_state_of_the_model():
    step = SimpleNamespace(measure=lambda params, batch, state=0.0: LossSums(np.float32(state), np.float32(2.0), {}))
    assert evaluate(step, None, [{}, {}], 3.0) == 1.5  # pyright: ignore[reportArgumentType]


def test_evaluation_is_at_most_a_few_batches_ahead():
    class Sum(np.ndarray):
        def block_until_ready(self):
            seen.append(f"wait {float(self):g}")

    def measured(params, batch, state=()):
        seen.append(f"start {batch:g}")
        return LossSums(np.array(batch).view(Sum), np.float32(1.0), {})  # pyright: ignore[reportArgumentType]

    seen = []
    evaluate(SimpleNamespace(measure=measured), None, [1.0, 2.0, 3.0, 4.0])  # pyright: ignore[reportArgumentType]
    assert seen == ["start 1", "start 2", "start 3", "wait 1", "start 4", "wait 2"]


def test_nothing_to_evaluate(model):
    step = spmdkit.build_step(model, optax.sgd(0.1), spmdkit.lay_out(model, {"data": 8}))
    empty = {**BATCH, "weights": np.zeros(ROWS, np.float32)}
    for nothing in ([], [empty]):
        with pytest.raises(ValueError, match=r"nothing to evaluate: .* Raise data\.eval_fraction"):
            evaluate(step, step.init(seed=0).params, nothing)


@pytest.mark.parametrize(("log_every", "save_every", "found"), [(10, 4, 8), (2, 4, 6), (3, 4, 6), (7, 12, 7)])
def test_finds_a_skipped_step_at_the_next_logged_step_or_save(log_every, save_every, found):
    """A step that gives back the state it was given, without any of its collectives."""
    step, saved = PretendStep(), []

    def skipping(state, batch):
        after, metrics = step(state, batch)
        return (state if int(state.step) == 5 and len(step.started) == 6 else after), metrics

    message = rf"Step {found}: the state of rank 0 has had {found - 1} updates\. This process has left"
    with pytest.raises(StepLeftOut, match=message):
        run_steps(
            skipping,  # pyright: ignore[reportArgumentType]
            first_state(),
            [{}] * 12,
            log_every=log_every,
            pause_at=lambda number: number % save_every == 0,
            after_pause=lambda number, state: saved.append(number),
        )
    assert saved == [4] * (save_every == 4)
    assert StepLeftOut.exit_code == 75


def test_steps_are_counted_from_those_that_the_state_has_had():
    """A caller may count from 0 with a state that has had five updates."""
    state = run_steps(PretendStep(), first_state(5), [{}] * 4, pause_at=lambda number: True)  # pyright: ignore[reportArgumentType]
    assert int(state.step) == 9
