"""A model of your own, a function that returns `init` and `loss`: `spmdkit train examples/own_model.yaml` trains it.

It predicts the next byte from the few before it: their embeddings side by side, one hidden layer, a softmax. There are
no devices in it and no collectives; the strategy in the YAML file decides where its parameters and rows live.
"""

import jax
import jax.numpy as jnp
from spmdkit.parallel import Model


def recent_bytes(vocabulary: int = 256, context: int = 8, width: int = 64, hidden: int = 512) -> Model:
    """Makes the model.

    Args:
        vocabulary: Number of token ids.
        context: Bytes it sees, the current one included.
        width: Size of a byte's embedding.
        hidden: Size of the hidden layer.
    """

    def init(key):
        embedding, first, second = jax.random.split(key, 3)
        return {
            "embedding": jax.random.normal(embedding, (vocabulary, width)) * 0.1,
            "hidden": jax.random.normal(first, (context * width, hidden)) * (context * width) ** -0.5,
            "output": jax.random.normal(second, (hidden, vocabulary)) * hidden**-0.5,
        }

    def logits(params, batch):
        embedded = params["embedding"][batch["inputs"]]  # (rows, length, width)
        length = embedded.shape[1]
        padded = jnp.pad(embedded, ((0, 0), (context - 1, 0), (0, 0)))
        seen = jnp.concatenate([padded[:, start : start + length] for start in range(context)], axis=-1)
        return jax.nn.gelu(seen @ params["hidden"]) @ params["output"]

    def loss(params, batch, key):
        log_probabilities = jax.nn.log_softmax(logits(params, batch))
        losses = -jnp.take_along_axis(log_probabilities, batch["targets"][..., None], axis=-1)[..., 0]
        return (losses * batch["weights"]).sum(), batch["weights"].sum()  # the runtime divides, once, over all devices

    return Model(init=init, loss=loss, predict=logits, name="recent bytes")
