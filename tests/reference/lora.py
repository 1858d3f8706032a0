"""Low-rank adapters of blocks in NumPy: the matrices of a block merged with them, and their gradients."""

import jax
import numpy as np


def merge(params, scale):
    """The parameters of the base, each adapted matrix with the product of its adapters added."""
    blocks = dict(params["blocks"])
    adapters = blocks.pop("lora")
    return {**params, "blocks": _add(blocks, adapters, scale)}


def pull(params, gradients, scale):
    """The gradients of base and adapters, from those of the merged matrices; only adapters have some."""
    still = jax.tree.map(np.zeros_like, gradients)
    trained = _pull(params["blocks"]["lora"], gradients["blocks"], scale)
    return {**still, "blocks": {**still["blocks"], "lora": trained}}


def _add(matrices, adapters, scale):
    if adapters.keys() == {"a", "b"}:
        return matrices + scale * adapters["a"] @ adapters["b"]
    merged = dict(matrices)
    for name, below in adapters.items():
        merged[name] = _add(matrices[name], below, scale)
    return merged


def _pull(adapters, gradients, scale):
    if adapters.keys() == {"a", "b"}:
        gradient = np.asarray(gradients)
        return {
            "a": scale * gradient @ np.swapaxes(adapters["b"], -1, -2),
            "b": scale * np.swapaxes(adapters["a"], -1, -2) @ gradient,
        }
    return {name: _pull(below, gradients[name], scale) for name, below in adapters.items()}
