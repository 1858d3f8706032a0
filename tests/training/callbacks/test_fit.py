"""Training from Python: real steps on eight devices, checkpoints, and going on."""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.checkpoints.replicas import ReplicasDiffer
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.processes import local_copy
from spmdkit.models.mlp import MLPConfig, mlp
from spmdkit.parallel.options import Precision
from spmdkit.training.callbacks.fit import fit
from spmdkit.training.callbacks.monitoring import BestCheckpoint, ReduceOnPlateau
from spmdkit.training.callbacks.rate_factor import LEARNING_RATE, adjustable, factors_of
from support import toy
from support.faults import flip_in

import spmdkit


@pytest.fixture(scope="module")
def step():
    model = mlp(MLPConfig(features=8, widths=(8,), classes=4))
    plan = spmdkit.lay_out(model, spmdkit.DeviceMesh.simulated(8, data=8))
    return spmdkit.build_step(model, adjustable(optax.sgd(0.1)), plan)


@pytest.fixture(scope="module")
def batch(step):
    rows = toy.labelled(np.random.default_rng(0), 16, 8, classes=4, dtype="float32")
    return jax.device_put(rows, step.plan.batch_sharding())


def test_callbacks_are_closed_after_an_error(step, batch):
    closed = []

    class Stream:
        def on_step_begin(self, run):
            raise OSError("gone")

        def close(self):
            closed.append("closed")

    with pytest.raises(UserError, match="gone"):
        fit(step, step.init(0), [batch], callbacks=[Stream()])
    assert closed == ["closed"]


def test_it_trains_to_the_end(step, batch, tmp_path):
    epochs = []

    class Epochs:
        def on_epoch_end(self, run, epoch):
            epochs.append((run.step, epoch))

    fitted = fit(step, step.init(0), [batch] * 8, callbacks=[Epochs()], log_every=2, folder=tmp_path, examples=3)
    assert (fitted.steps, fitted.why, int(fitted.state.step)) == (8, "", 8)
    assert [record["step"] for record in fitted.records] == [2, 3, 4, 6, 8]
    assert epochs == [(3, 0), (6, 1)]


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint(step, batch, tmp_path):
    """The plateau's count and the factor, and which checkpoint is the best, come back with the state."""
    losses = iter([3.0, 4.0, 5.0, 6.0, 7.0, 8.0] * 2)

    def train(checkpoints, state, start, steps):
        callbacks = [ReduceOnPlateau(patience=2), BestCheckpoint()]
        return fit(
            step,
            state,
            [batch] * (steps - start),
            callbacks=callbacks,
            evaluate=lambda state: {"eval_loss": next(losses)},
            evaluate_every=2,
            checkpoints=checkpoints,
            folder=tmp_path,
            start=start,
            say=lambda line: None,
        )

    with Checkpoints(tmp_path / "c", keep=1, abstract_state=step.abstract_state()) as checkpoints:
        train(checkpoints, step.init(0), 0, 8)
        assert checkpoints.steps() == [2, 8]
        fitted = train(checkpoints, checkpoints.restore(), 8, 12)
        assert checkpoints.steps() == [2, 12], "the best is still known"
    assert factors_of(fitted.state)[LEARNING_RATE] == 0.25


def test_a_callback_that_ends_training_causes_one_save(step, batch, tmp_path):
    saved, stop = [], SimpleNamespace(on_evaluation_end=lambda run, metrics: run.stop("enough"))
    checkpoints = SimpleNamespace(save=lambda number, *_, **__: saved.append(number), wait=lambda: None)
    options = {"evaluate": lambda state: {"eval_loss": 1.0}, "evaluate_every": 2, "folder": tmp_path}
    fitted = fit(step, step.init(0), [batch] * 4, callbacks=[stop], checkpoints=checkpoints, **options)
    assert (fitted.steps, fitted.why, saved) == (2, "enough", [2])


def test_what_is_missing(step, batch, tmp_path):
    with pytest.raises(UserError, match="these batches do not have a length"):
        fit(step, step.init(0), iter([batch]), folder=tmp_path)
    with pytest.raises(UserError, match="The batches ended after step 1 of 3"):
        fit(step, step.init(0), iter([batch]), num_steps=3, folder=tmp_path)
    with pytest.raises(UserError, match="a dict without an event"):
        fit(step, step.init(0), [batch], callbacks=[{}], folder=tmp_path)
    plain = spmdkit.build_step(step.given_model, optax.sgd(0.1), step.plan)
    evaluate = {"evaluate": lambda state: {"eval_loss": 1.0}, "evaluate_every": 1}
    with pytest.raises(UserError, match="give build_step the optimizer `adjustable"):
        fit(plain, plain.init(0), [batch] * 3, callbacks=[ReduceOnPlateau(patience=1)], **evaluate, folder=tmp_path)


def test_float16_leaves_updates_out_until_its_scale_fits(step, batch, tmp_path):
    half = Precision(compute="float16", loss_scale_initial=2.0**22)
    scaled, said = spmdkit.build_step(step.given_model, optax.sgd(0.1), step.plan, precision=half), []
    fitted = fit(scaled, scaled.init(0), [batch] * 12, folder=tmp_path, log_every=1, say=said.append)
    first = fitted.records[0]["step"]
    assert 1 < first < 12
    assert [line.partition(":")[0] for line in said] == [f"Step {number}" for number in range(1, first)]
    assert said[0].endswith("its update was left out (loss_scale, which halves).")
    assert float(fitted.state.loss_scale.scale) == 2.0**22 / 2 ** (first - 1)
    assert fitted.records[-1]["loss"] < fitted.records[0]["loss"]


def test_copies_are_compared_before_a_save(step, batch, tmp_path):
    def flipping(state, batch):
        if int(local_copy(state.step)) == 3:
            state = flip_in(state, "params/layers/0/kernel", jax.devices()[5])
        return step(state, batch)

    with Checkpoints(tmp_path, keep=3, abstract_state=step.abstract_state()) as checkpoints:
        with pytest.raises(ReplicasDiffer, match=r"Step 4: .*\n  params/layers/0/kernel: cpu:5 \(rank 0\) has other"):
            fit(flipping, step.init(0), [batch] * 6, checkpoints=checkpoints, save_every=2, folder=tmp_path)
        checkpoints.wait()
        assert checkpoints.steps() == [2]
