"""Arrays of any names, several outputs and class weights: the loss of data_several_outputs.yaml.

`python examples/data_several_outputs.py` writes points.npz beside this file; `points` makes the same in memory, as the
config's `data.source`. A point has a class, of which one is rare, and a distance from the middle.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from spmdkit.data import DataConfig, Splits, from_arrays

from spmdkit import Model


def arrays(rows: int, seed: int) -> dict[str, np.ndarray]:
    """The points of one split; a row of the rare class counts four times."""
    random = np.random.default_rng(seed)
    points = random.normal(size=(rows, 2)).astype(np.float32)
    label = (points.min(1) > 0.3).astype(np.int32)
    class_weights = np.array([1, 4], np.float32)
    return {
        "point": points,
        "targets/label": label,
        "targets/distance": np.linalg.norm(points, axis=1),
        "weights": class_weights[label],
    }


def points(config: DataConfig) -> Splits:
    """`data.source: data_several_outputs:points`."""
    return from_arrays(arrays(2048, 0), arrays(256, 1))


def two_heads(hidden: int = 32) -> Model:
    """A layer, and two heads on it: which class, and how far."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        return {
            "layer": jax.random.normal(first, (2, hidden)),
            "heads": jax.random.normal(second, (hidden, 3)) / hidden**0.5,
        }

    def loss(params, batch, key):
        outputs = jnp.tanh(batch["point"] @ params["layer"]) @ params["heads"]
        log_p = jax.nn.log_softmax(outputs[:, :2])
        of_label = -jnp.take_along_axis(log_p, batch["targets/label"][:, None], axis=1)[:, 0]
        of_distance = (outputs[:, 2] - batch["targets/distance"]) ** 2
        weights = batch["weights"]
        return (weights * (of_label + of_distance)).sum(), weights.sum()

    return Model(init=init, loss=loss)


if __name__ == "__main__":
    np.savez(Path(__file__).with_name("points.npz"), allow_pickle=False, **arrays(2048, 0))
