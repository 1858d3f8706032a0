"""A CNN with batch norm on real images: as in Flax on one device, to an accuracy, and in two phases."""

import jax
import numpy as np
import optax
import pytest
from spmdkit.checkpoints.restore import StoredCheckpoint
from spmdkit.configs import load_config
from spmdkit.launch.cli import main
from spmdkit.runtime.build_run import build
from spmdkit.runtime.rollbacks import batches_after
from spmdkit.training.metrics import read_metrics
from support.runs import EXAMPLES, example

pytestmark = [pytest.mark.usefixtures("broadcasting"), pytest.mark.slow]
STEPS = 4
FLOAT64 = [f"precision.{part}=float64" for part in ("params", "compute", "reduce")]


def test_the_losses_are_those_of_flax_on_one_device(tmp_path):
    file = EXAMPLES / "digits_cnn.yaml"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 20
    with jax.enable_x64(True):
        run = build(load_config(file, [f"run.dir={tmp_path}", f"train.steps={STEPS}", *FLOAT64]))
        module = example("digits_cnn").CNN(width=16)
        variables = module.init(jax.random.key(0), np.zeros((1, 8, 8, 1)), train=False)
        variables = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables)
        state, found = run.step.init(0, params=variables["params"]), []
        batches = [{name: np.asarray(array) for name, array in batch.items()} for batch in batches_after(0, run)]
        for batch in batches:
            state, metrics = run.step(state, batch)
            found.append(float(metrics.loss))
        expected = in_flax(module, variables, batches)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def in_flax(module, variables, batches):
    """Its own loop: whole batches on one device."""
    optimizer, params, stats, losses = optax.adam(3e-3), variables["params"], variables["batch_stats"], []
    moments = optimizer.init(params)

    @jax.jit
    def step(params, stats, moments, inputs, targets):
        def loss(params):
            given = {"params": params, "batch_stats": stats}
            logits, changed = module.apply(given, inputs, train=True, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return losses.mean(), changed["batch_stats"]

        (value, after), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments_after = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), after, moments_after, value

    for batch in batches:
        inputs = batch["inputs"].astype(np.float64)
        params, stats, moments, value = step(params, stats, moments, inputs, batch["targets"])
        losses.append(float(value))
    return losses


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
