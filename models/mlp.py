"""A classifier: layers of products and ReLU. A plain `Model`: one init, one loss.

Letters: B rows, I features in, J features out of a layer. Parameters, for layer n:

    layers/n/kernel  (I, J)     layers/n/bias  (J,)
"""

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from ..mesh.errors import raise_problems
from ..parallel.model import Batch, Model, Params
from ..parallel.sharding.named_outputs import name_output
from .layers import cross_entropy, truncated_normal
from .transformer_config import Count, Positive


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Sizes of the classifier."""

    features: Count = 0
    """Values in the inputs of an example; 0 = the data's."""
    classes: Count = 0
    """Number of classes (required)."""
    widths: tuple[Positive, ...] = (128, 128)
    """Widths of the hidden layers, first to last; none = a linear classifier."""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The features (in, out) of each layer."""
        return list(itertools.pairwise((self.features, *self.widths, self.classes)))

    @property
    def flops_per_row(self) -> float:
        """Operations of forward and backward for one row: 6 for each element of the kernels."""
        return 6.0 * sum(rows * columns for rows, columns in self.sizes)


def mlp(config: MLPConfig) -> Model:
    """Builds the model.

    Args:
        config: The sizes, all known.

    Returns:
        A classifier over batches {"inputs" (B, features), "targets" (B,), "weights" (B,)}; `predict` gives logits.

    Raises:
        UserError: The number of features or classes is still 0.
    """
    unknown = [name for name in ("features", "classes") if not getattr(config, name)]
    raise_problems(f"model.{name} is missing, and the data does not determine it." for name in unknown)
    return Model(
        init=functools.partial(init, config), loss=loss, predict=predict, name="mlp", flops_per_row=config.flops_per_row
    )


def init(config: MLPConfig, key: Array) -> Params:
    """Draws kernels that keep the scale of activations through a ReLU (He et al. 2015); biases are 0."""

    def layer(index: int, size: tuple[int, int]) -> dict[str, Array]:
        kernel = truncated_normal(key, f"layers/{index}/kernel", size, (2 / size[0]) ** 0.5)
        return {"kernel": kernel, "bias": jnp.zeros((size[1],), jnp.float32)}

    return {"layers": [layer(index, size) for index, size in enumerate(config.sizes)]}


def predict(params: Params, batch: Batch) -> Array:
    """Returns logits (B, classes), float32 or wider."""
    *hidden, last = params["layers"]
    x_BI = batch["inputs"].astype(last["kernel"].dtype)
    for index, layer in enumerate(hidden):
        x_BI = name_output(jax.nn.relu(_affine(layer, x_BI)), f"layers/{index}/output")
    logits = name_output(_affine(last, x_BI), f"layers/{len(hidden)}/output")
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def loss(params: Params, batch: Batch, key: Array | None) -> tuple[Array, Array]:
    """Returns the cross-entropy of the classes as (sum, weight)."""
    return cross_entropy(predict(params, batch), batch["targets"], batch["weights"])


def _affine(layer: dict[str, Array], x_BI: Array) -> Array:
    return x_BI @ layer["kernel"] + layer["bias"][None, :]
