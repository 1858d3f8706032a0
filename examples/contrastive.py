"""A contrastive loss: every row is compared with the rows of all devices (`spmdkit train examples/contrastive.yaml`).

The model sees the upper and the lower half of an image, and learns which halves belong together. On each device, `loss`
has only its own rows. It gathers the lower and upper halves of all others, as vectors, over `batch_axes()`: the mesh
axes that split the rows. On one device there are none, and `all_gather` returns its argument.
"""

import jax
import jax.numpy as jnp
from jax import lax

from spmdkit import LossSums, Model, batch_axes

NEVER = -1e9


def halves(features: int = 64, hidden: int = 64, width: int = 16) -> Model:
    """Makes the model.

    Args:
        features: The values of an image, rows of pixels from top to bottom.
        hidden: The size of the hidden layers.
        width: The size of the vectors that are compared.
    """

    def init(key):
        shapes = {"first": (features // 2, hidden), "second": (hidden, width)}
        names = [(half, layer) for half in ("upper", "lower") for layer in shapes]
        params = {"upper": {}, "lower": {}, "temperature": jnp.float32(2.0)}
        for number, (half, layer) in enumerate(names):
            rows, _ = shapes[layer]
            draw = jax.random.normal(jax.random.fold_in(key, number), shapes[layer])
            params[half][layer] = draw * rows**-0.5
        return params

    def encode(layers, x):
        vectors = jnp.tanh(x @ layers["first"]) @ layers["second"]
        return vectors / (jnp.linalg.norm(vectors, axis=-1, keepdims=True) + 1e-6)

    def loss(params, batch, key):
        upper = encode(params["upper"], batch["inputs"][:, : features // 2])
        lower = encode(params["lower"], batch["inputs"][:, features // 2 :])
        own = {"upper": upper, "lower": lower, "example": batch["example"], "weights": batch["weights"]}
        of_all = lax.all_gather(own, batch_axes(), tiled=True)  # the rows of all devices, in the same order on each
        same = batch["example"][:, None] == of_all["example"][None, :]
        counts = of_all["weights"][None, :] > 0  # padding of the last evaluation batch is no candidate

        def choose(vectors, others):
            scores = jnp.where(counts, vectors @ others.T * jnp.exp(params["temperature"]), NEVER)
            losses = -jnp.where(same, jax.nn.log_softmax(scores), 0).sum(axis=1)
            is_right = jnp.take_along_axis(same, scores.argmax(axis=1, keepdims=True), axis=1)[:, 0]
            return losses, is_right

        losses, is_right = choose(upper, of_all["lower"])
        reverse_losses, _ = choose(lower, of_all["upper"])
        weight = batch["weights"].sum()
        total = ((losses + reverse_losses) / 2 * batch["weights"]).sum()
        hits = (is_right * batch["weights"]).sum()
        return LossSums(total, weight, {"matched": (hits, weight)})

    return Model(init=init, loss=loss, name="halves")
