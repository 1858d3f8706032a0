"""A training loop from scratch, on the pieces of `spmdkit train`: mesh, plan, step, batches, checkpoint."""

import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from spmdkit.data import DataConfig, open_splits

import spmdkit


def init(key):
    """Two layers for images of 64 values."""
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (64, 128)) / 8, "down": jax.random.normal(down, (128, 10)) / 12}


def loss(params, batch, key):
    """Sums over the rows of one device, with a metric beside them."""
    logits = jax.nn.relu(batch["inputs"] @ params["up"]) @ params["down"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    hits = logits.argmax(-1) == batch["targets"]
    weights = batch["weights"]
    return losses @ weights, weights.sum(), {"accuracy": ((hits * weights).sum(), weights.sum())}


def main(steps=60):
    """Trains, evaluates, saves, and restores onto another mesh."""
    mesh = spmdkit.DeviceMesh.simulated(8, data=2, fsdp=4)
    model = spmdkit.Model(init=init, loss=loss, name="two layers")
    plan = spmdkit.lay_out(model, mesh)
    step = spmdkit.build_step(model, optax.adamw(3e-3), plan, clip_norm=1.0)
    digits = open_splits(DataConfig(source="synthetic"))
    state, rows = step.init(seed=0), {"global_batch": 64, "seed": 0}

    batches = spmdkit.train_batches(digits.train, plan.batch_sharding(), start_step=0, num_steps=steps, **rows)
    for number, batch in enumerate(batches, 1):
        state, metrics = step(state, batch)  # `state` is consumed; metrics are read a step later by better loops
        if number % 20 == 0:
            print(f"step {number}: loss {float(metrics.loss):.4f}, accuracy {float(metrics.model['accuracy']):.3f}")

    held_out = spmdkit.eval_batches(digits.evaluation, plan.batch_sharding(), global_batch=64)
    sums = [step.measure(state.params, batch) for batch in held_out]
    hits, counted = (sum(float(each.metrics["accuracy"][part]) for each in sums) for part in (0, 1))

    elsewhere = spmdkit.build_step(model, optax.adamw(3e-3), spmdkit.lay_out(model, {"fsdp": 8}), clip_norm=1.0)
    with tempfile.TemporaryDirectory() as folder:
        with spmdkit.Checkpoints(Path(folder), keep=1, abstract_state=step.abstract_state()) as checkpoints:
            checkpoints.save(steps, state)
        with spmdkit.Checkpoints(Path(folder), keep=1, abstract_state=elsewhere.abstract_state()) as checkpoints:
            restored = checkpoints.restore()
    same = jax.tree.all(jax.tree.map(lambda *both: bool(np.array_equal(*jax.device_get(both))), restored, state))
    print(f"evaluation: accuracy {hits / counted:.3f}; restored onto fsdp 8: {same}")
    return hits / counted, same


if __name__ == "__main__":
    main()
