"""The rows of the equivalence table made into models, batches, parameters and an optimizer that shows gradients."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference
from spmdkit.layouts.paths import map_with_path
from spmdkit.models.frozen import freeze, frozen_paths
from spmdkit.models.lora import LoRA, LoRAConfig
from spmdkit.models.mlp import MLPConfig, mlp
from spmdkit.models.moe import MoEConfig, moe
from spmdkit.models.transformer import TransformerConfig, transformer
from support import table

STEPS, ROWS, LENGTH, VOCABULARY, FEATURES, CLASSES = 10, 16, 16, 32, 8, 8
SIZES: dict[str, Any] = {"vocabulary": VOCABULARY, "length": LENGTH, "width": 16, "heads": 8, "kv_heads": 2}
SIZES |= {"head_width": 2, "mlp_width": 32}

ARRANGED: dict[str, dict[str, Any]] = {
    "qwen": {"attention_bias": "all", "mlp_bias": True, "head_norm": True, "head_width": 4, "mlp_width": 40}
    | {"rope_factor": 4.0, "rope_trained_length": 8, "rope_slow_turns": 0.01, "rope_fast_turns": 2.0},
    "gpt": {"norm": "layer", "positions": "learned", "mlp": "gelu", "mlp_bias": True, "max_length": 20}
    | {"mlp_width": 48},
}
"""As other families arrange it. Without rotary positions a bias of keys changes nothing, and its gradient is noise; a
norm of two numbers alone would lose digits."""
MODELS = {"mlp": mlp, "moe": moe}
REFERENCES = {"mlp": reference.mlp, "moe": reference.mixture}


def config(kind, layers, dropout=0.0):
    """The models of the table."""
    if kind == "mlp":
        return MLPConfig(features=FEATURES, widths=(16, 16), classes=CLASSES)
    if kind == "moe":
        return MoEConfig(**SIZES, layers=layers, experts=8, top_k=2, dropout=dropout)
    return TransformerConfig(**SIZES | ARRANGED.get(kind, {}), layers=layers, tied=kind == "tied", dropout=dropout)


@cache
def model(kind, layers, dropout=0.0):
    """The runtime's model."""
    return MODELS.get(kind, transformer)(config(kind, layers, dropout))


PART = ("blocks/mlp/.*", "embed/.*")
"""What is frozen in rows that train a part."""
ADAPTED = LoRAConfig(rank=2, alpha=3.0, match=("blocks/(attention|mlp)/.*",))


@cache
def trained(training):
    """The model as it trains, and the paths of its frozen parameters."""
    own = model(training.kind, training.layers, training.dropout)
    if training.train == "lora":
        lora = LoRA(own, ADAPTED)
        return lora.model, lora.frozen
    if training.train == "part":
        shapes = jax.eval_shape(own.init, jax.random.key(0))
        return freeze(own, PART), frozen_paths(PART, shapes)
    return own, frozenset()


@cache
def params_of(training):
    """The first parameters; adapters are random, so that no gradient is zero."""
    params = first_params(training.kind, training.layers)
    if training.train != "lora":
        return params
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(trained(training)[0].init, jax.random.key(0))
    adapters = jax.tree.map(
        lambda leaf: (0.1 * random.normal(size=leaf.shape)).astype(np.float32), shapes["blocks"]["lora"]
    )
    return {**params, "blocks": {**params["blocks"], "lora": adapters}}


def differentiate(training, params, batch, key):
    """((sum of the losses, sum of the weights), gradients of the first) on one device, zeros for frozen ones."""
    kind = plain(training.kind)
    own = config(training.kind, training.layers, training.dropout)
    if training.train == "lora":
        merged = reference.lora.merge(params, ADAPTED.scale)
        sums, gradients = kind.differentiate(own, merged, batch, key)
        return sums, reference.lora.pull(params, gradients, ADAPTED.scale)
    sums, gradients = kind.differentiate(own, params, batch, key)
    return sums, without(trained(training)[1], gradients)


def without(frozen, tree):
    """A tree with zeros at some paths."""
    return map_with_path(lambda path, leaf: 0 * leaf if path in frozen else leaf, tree)


def plain(kind):
    """The same model, written without anything of the runtime."""
    return REFERENCES.get(kind, reference.transformer)


class Recorded(NamedTuple):
    """The gradients a step used, left in the optimizer's state in their parameters' layouts."""

    gradients: Any


def optimizer(frozen=frozenset()):
    """AdamW that keeps the gradients it was given, so that one compiled step shows them too."""
    record = optax.GradientTransformation(
        lambda params: Recorded(jax.tree.map(jnp.zeros_like, params)),
        lambda grads, _, params=None: (grads, Recorded(grads)),
    )
    adamw = optax.adamw(1e-3, weight_decay=0.1)
    if not frozen:
        return optax.chain(record, adamw)
    return optax.chain(record, adamw, optax.stateless(lambda updates, _: without(frozen, updates)))


@cache
def batches(is_mlp):
    """Ten batches whose weights are ragged."""
    random = np.random.default_rng(1)
    made = []
    for step in range(STEPS):
        rows = (ROWS,) if is_mlp else (ROWS, LENGTH)
        inputs = random.normal(size=(ROWS, FEATURES)) if is_mlp else random.integers(0, VOCABULARY, rows)
        made.append(
            {
                "inputs": inputs.astype(np.float32 if is_mlp else np.int32),
                "targets": random.integers(0, CLASSES, rows).astype(np.int32),
                "weights": (random.random(rows) < 0.7).astype(np.float32),
                "example": np.arange(ROWS, dtype=np.int32) + step * ROWS,
            }
        )
    return made


@cache
def first_params(kind, layers):
    """Parameters as they are to be drawn, wherever."""
    return plain(kind).init(config(kind, layers), jax.random.key(0))


def row_named(name):
    """A row of the table."""
    return next(row for row in [*table.ROWS, *table.ROWS_OF_GPUS] if row.name == name)


def sizes_of(row):
    """The size of each axis."""
    return {axis: getattr(config, "size", config) for axis, config in row.strategy.items()}


def num_devices(row):
    """The devices that a row takes."""
    return int(np.prod(list(sizes_of(row).values())))
