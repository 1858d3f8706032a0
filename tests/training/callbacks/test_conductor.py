"""When callbacks are called, and what is done with what they ask for."""

import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.callback import EVENTS
from spmdkit.training.callbacks.rate_factor import LEARNING_RATE, factors_of
from support.training import play


class Listening:
    """Notes every event with its step, and does what it is told at some."""

    def __init__(self, **at):
        self.heard, self.at = [], at

    def __getattr__(self, name):
        if name not in EVENTS:
            raise AttributeError(name)

        def hear(run, *arguments):
            self.heard.append((name.removeprefix("on_"), run.step))
            self.at.get(name, lambda run, *arguments: None)(run, *arguments)

        return hear

    def of(self, *names):
        return [each for each in self.heard if each[0] in names]


def at(step, action):
    """Does something when an event comes at a step, once."""
    done = []

    def act(run, *arguments):
        if run.step == step and not done:
            done.append(step)
            action(run)

    return act


def test_events_come_in_order():
    listening = Listening()
    played = play(listening, steps=3, losses=[5.0, 4.0], every=2, saves=(2,))
    pauses = ["evaluation_begin", "evaluation_end", "save_begin", "save_end"]
    begun = [("train_begin", 0), ("step_begin", 1), ("step_begin", 2)]
    expected = [*begun, *((event, 2) for event in pauses), ("step_begin", 3)]
    assert listening.of("train_begin", "step_begin", *pauses) == expected
    assert listening.heard[-1] == ("train_end", 3)
    assert len(listening.of("step_end")) == 3
    assert [record.get("eval_loss") for record in played.records] == [None, 5.0, None]


def test_epochs_end_when_every_example_was_read():
    """10 rows an epoch, 4 a step: the first is read after 2.5 steps, the second after 5."""
    listening = Listening()
    play(listening, steps=6, step_batch=(4, 10))
    last = [("epoch_end", 5), ("epoch_begin", 5)]
    assert listening.of("epoch_begin", "epoch_end") == [("epoch_begin", 0), ("epoch_end", 3), ("epoch_begin", 3), *last]
    resumed = Listening()
    play(resumed, steps=6, start=4, step_batch=(4, 10))
    assert resumed.of("epoch_begin", "epoch_end") == [("epoch_begin", 4), *last]


def test_runs_without_pauses_if_no_callback_uses_epochs():
    class Quiet:
        def on_step_begin(self, run): ...

    assert [record["step"] for record in play(Quiet(), steps=5, step_batch=(4, 4)).records] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("event", ["on_evaluation_end", "on_evaluation_begin"])
def test_stop_in_a_pause_ends_at_that_step(event):
    played = play(Listening(**{event: at(4, lambda run: run.stop("enough"))}), losses=[1.0], steps=12)
    assert (played.step, played.ended.end, played.ended.reason) == (4, "finished", "enough")
    assert list(played.saved) == [4]


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end"])
def test_stop_between_pauses_evaluates_and_saves_the_next_step(event):
    played = play(Listening(**{event: at(5, lambda run: run.stop("enough"))}), losses=[1.0], every=100, steps=12)
    assert played.step == 6
    assert played.records[-1] == {"step": 6, "loss": 6.0, "eval_loss": 1.0}
    assert list(played.saved) == [6]


def test_interruption_saves_without_evaluation():
    interrupt = at(3, lambda run: run.interrupt("a file", try_again=True))
    played = play(Listening(on_step_begin=interrupt), losses=[1.0], every=100)
    assert (played.step, played.ended.end, list(played.saved)) == (4, "try_again", [4])
    assert not any("eval_loss" in record for record in played.records)


def test_request_during_a_save_takes_effect_at_the_next_step():
    played = play(Listening(on_save_end=at(4, lambda run: run.stop("saved once"))), saves=(4,))
    assert (played.step, list(played.saved)) == (5, [4, 5])


def test_repeated_requests_run_once():
    def ask(run):
        for _ in range(3):
            run.evaluate()
            run.save()

    listening = Listening(on_step_begin=at(3, ask))
    played = play(listening, losses=[1.0], every=100, steps=6)
    assert listening.of("evaluation_end", "save_end") == [("evaluation_end", 4), ("save_end", 4)]
    assert [record["step"] for record in played.records if "eval_loss" in record] == [4]


def test_evaluates_at_the_end_of_an_epoch_on_request():
    evaluate_and_stop = {
        "on_epoch_end": lambda run, epoch: run.evaluate(),
        "on_evaluation_end": at(3, lambda run: run.stop("the first epoch was enough")),
    }
    played = play(Listening(**evaluate_and_stop), losses=[1.0], every=100, step_batch=(4, 10))
    assert played.step == 3
    assert played.records[-1]["eval_loss"] == 1.0


def test_saved_state_contains_the_new_factor():
    seen = []
    scale = Listening(
        on_evaluation_end=lambda run, metrics: run.scale_learning_rate(0.5),
        on_save_begin=lambda run: seen.append((run.step, factors_of(run.state)[LEARNING_RATE])),
    )
    played = play(scale, losses=[1.0], every=2, saves=(2, 4), steps=5)
    assert seen == [(2, 0.5), (4, 0.25)]
    assert (factors_of(played.state)[LEARNING_RATE], played.run.learning_rate_factor) == (0.25, 0.25)
    resumed = play(Listening(), start=5, steps=7, state=played.state)
    assert resumed.run.learning_rate_factor == 0.25


def test_state_is_only_available_in_pauses():
    seen = {}

    def note(name):
        return lambda run, *arguments: seen.setdefault(name, run.state is not None)

    play(Listening(**{name: note(name) for name in EVENTS}), losses=[1.0], saves=(2,), step_batch=(1, 3))
    assert {name for name, there in seen.items() if not there} == {"on_step_begin", "on_step_end"}
    assert seen.keys() == set(EVENTS)


def test_restores_notes_to_the_callback_that_wrote_them():
    class Counting:
        def __init__(self):
            self.count = 0

        def on_step_begin(self, run):
            self.count += 1

        def state(self):
            return {"count": self.count}

        def restore(self, state):
            self.count = state["count"]

    class Other(Counting): ...

    first = play(Counting(), Other(), Counting(), saves=(3,), steps=5)
    counting = [Counting(), Counting(), Other()]
    play(*counting, start=3, steps=5, notes=first.saved[3])
    assert [each.count for each in counting] == [5, 5, 5]
    new = [Counting(), Counting(), Counting(), Other()]
    play(*new, start=3, steps=5, notes=first.saved[3])
    assert [each.count for each in new] == [5, 5, 2, 5]


def test_rejects_a_state_that_is_not_json():
    callback = type("Mine", (), {"state": lambda self: {"best": np.float32(2)}})()
    with pytest.raises(UserError, match=r"0 \(Mine\): state\(\) must return values that JSON can hold, got .*float32"):
        play(callback, saves=[2])


def test_error_names_its_line_and_closes_all_callbacks():
    closed = []

    class Closing:
        def close(self):
            closed.append(self)

        def on_step_begin(self, run): ...

    class Failing(Closing):
        def on_evaluation_end(self, run, metrics):
            raise ValueError("no such thing")

    with pytest.raises(UserError, match=r"1 \(Failing\), on_evaluation_end fails in .*_conductor.py, line \d+ .*no"):
        play(Closing(), Failing(), losses=[1.0])
    assert len(closed) == 2


def test_rejects_invalid_requests():
    with pytest.raises(UserError, match="the evaluation split is missing"):
        play(Listening(on_step_begin=lambda run: run.evaluate()))
    with pytest.raises(UserError, match=r"by=0\): the factor must be a positive, finite number"):
        play(Listening(on_step_begin=lambda run: run.scale_learning_rate(0)))
