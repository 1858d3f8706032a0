"""Fits, evaluates and predicts with one object, on 8 devices, without a config: `python examples/trainer.py`."""

import numpy as np
import optax
from flax import linen as nn

import spmdkit


class Net(nn.Module):
    """Which of three groups a point is of."""

    @nn.compact
    def __call__(self, x, train: bool):
        """(rows, 8) -> logits (rows, 3)."""
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(64)(x))
        return nn.Dense(3)(nn.relu(x))


def main():
    """Trains three epochs; 1,003 rows are held out."""
    spmdkit.DeviceMesh.simulated(8)
    fsdp, random = {"fsdp": {"size": 8, "floor_bytes": 1024}}, np.random.default_rng(0)
    y = random.integers(0, 3, 5003).astype(np.int32)
    x = (random.normal(size=(5003, 8)) + 2 * np.eye(3, 8)[y]).astype(np.float32)
    scored = {"loss": "softmax_cross_entropy", "metrics": {"accuracy": "accuracy"}}
    model = spmdkit.adapt(Net(), **scored, example={"inputs": x[:1], "targets": y[:1]})
    trainer = spmdkit.Trainer(model, optax.adam(1e-2), fsdp, global_batch=64)
    trainer.fit((x[:4000], y[:4000]), epochs=3, evaluation=(x[4000:], y[4000:]))
    return trainer.evaluate((x[4000:], y[4000:])), trainer.predict({"inputs": x[4000:]})


if __name__ == "__main__":
    print(main())
