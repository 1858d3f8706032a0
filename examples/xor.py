"""The continuous XOR of Flax's tutorials: is exactly one of two noisy bits set? A Linen module on 8 devices."""

import numpy as np
import optax
from flax import linen as nn

import spmdkit


class Classifier(nn.Module):
    """Two numbers to one logit."""

    @nn.compact
    def __call__(self, x):
        """(rows, 2) -> (rows, 1)."""
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(x)))


def rows_of(count, seed):
    """Noisy bits and whether exactly one of them is set."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2, (count, 2))
    return {
        "inputs": (bits + 0.1 * random.normal(size=bits.shape)).astype("float32"),
        "targets": (bits[:, 0] ^ bits[:, 1]).astype("float32"),
        "weights": np.ones(count, "float32"),
    }


def main(steps=200):
    """Trains on 8 devices; returns the accuracy on rows that were held out."""
    metrics = {"accuracy": "accuracy"}
    model = spmdkit.adapt(Classifier(), loss="sigmoid_cross_entropy", metrics=metrics, example=rows_of(1, 0))
    plan = spmdkit.lay_out(model, {"data": 8})
    step = spmdkit.build_step(model, optax.adam(3e-2), plan)
    data = spmdkit.from_arrays(rows_of(2048, 0), rows_of(256, 1))
    train = spmdkit.train_batches(
        data.train, plan.batch_sharding(), global_batch=128, seed=0, start_step=0, num_steps=steps
    )
    state = spmdkit.run_steps(step, step.init(seed=0), train, log_every=50, on_progress=print)
    held_out = spmdkit.eval_batches(data.evaluation, plan.batch_sharding(), global_batch=128)
    sums = [step.measure(state.params, batch) for batch in held_out]
    hits, counted = (sum(float(each.metrics["accuracy"][part]) for each in sums) for part in (0, 1))
    print(f"accuracy {hits / counted:.3f}")
    return hits / counted


if __name__ == "__main__":
    spmdkit.DeviceMesh.simulated(8, data=8)
    main()
