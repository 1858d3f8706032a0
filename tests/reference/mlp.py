"""The classifier, written plainly."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .transformer import cross_entropy, draw


def differentiate(config, params, batch, key=None):
    """((sum of the weighted losses, sum of the weights), gradients of the first)."""
    return jax.value_and_grad(partial(_loss, batch=batch), has_aux=True)(params)


@jax.jit
def _loss(params, batch):
    x = jnp.asarray(batch["inputs"], params["layers"][0]["kernel"].dtype)
    for number, layer in enumerate(params["layers"]):
        x = x @ layer["kernel"] + layer["bias"][None]
        x = x if number == len(params["layers"]) - 1 else jnp.where(x > 0, x, 0.0)
    return cross_entropy(x, batch["targets"], batch["weights"])


def init(config, key):
    """First parameters in NumPy float32."""
    sizes = [config.features, *config.widths, config.classes]
    layers = []
    for number, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        kernel = draw(key, f"layers/{number}/kernel", (rows, columns), (2 / rows) ** 0.5)
        layers.append({"kernel": kernel, "bias": np.zeros(columns, np.float32)})
    return {"layers": layers}
