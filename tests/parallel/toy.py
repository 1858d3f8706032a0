"""A small model with blocks and a plain one, for tests of the runtime alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel import BlockModel, Model

WIDTH, VOCABULARY, BLOCKS = 16, 32, 3
ROWS, LENGTH = 16, 8


def init(key):
    keys = jax.random.split(key, 4)

    def normal(key, *shape):
        return jax.random.normal(key, shape) * 0.1

    return {
        "embed": {"table": normal(keys[0], VOCABULARY, WIDTH)},
        "blocks": {
            "up": normal(keys[1], BLOCKS, WIDTH, 4 * WIDTH),
            "down": normal(keys[2], BLOCKS, 4 * WIDTH, WIDTH),
            "scale": jnp.ones((BLOCKS, WIDTH)),
        },
        "head": {"out": normal(keys[3], WIDTH, VOCABULARY)},
    }


def embed(groups, batch, key):
    return groups["embed"]["table"][batch["inputs"]]


def block(params, x, key):
    return x + jnp.tanh((x * params["scale"][None, None]) @ params["up"]) @ params["down"]


def head(groups, x, batch, key):
    return cross_entropy(x @ groups["head"]["out"], batch)


def tied_head(groups, x, batch, key):
    return cross_entropy(x @ groups["embed"]["table"].T, batch)


def cross_entropy(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.promote_types(logits.dtype, "float32")), batch["targets"]
    )
    weights = batch["weights"].astype(losses.dtype)
    return (losses * weights).sum(), weights.sum()


BLOCK_MODEL = BlockModel(init=init, embed=embed, block=block, head=head, num_blocks=BLOCKS)
PLAIN_MODEL = Model(init=init, loss=BLOCK_MODEL.loss)


def batch(seed, rows=ROWS):
    """Rows with ragged weights, so that no two shards or microbatches weigh the same."""
    random = np.random.default_rng(seed)
    return {
        "inputs": random.integers(0, VOCABULARY, (rows, LENGTH)).astype(np.int32),
        "targets": random.integers(0, VOCABULARY, (rows, LENGTH)).astype(np.int32),
        "weights": (random.random((rows, LENGTH)) < random.random((rows, 1))).astype(np.float32),
        "example": np.arange(rows, dtype=np.int32),
    }


def abstract(arrays):
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}


def mesh(**sizes):
    """A mesh over the first of the simulated devices."""
    count = int(np.prod(list(sizes.values())))
    return DeviceMesh.of(devices(count), **sizes)


def devices(count):
    """Names of the first simulated devices."""
    return [f"cpu:{index}" for index in range(count)]


def relative(value, reference):
    """The largest difference, relative to the largest element of the reference."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    return np.abs(value - reference).max() / max(np.abs(reference).max(), 1e-300)


def summed_dtypes(text):
    """What is summed over devices, by the types behind the function that adds two of them."""
    pattern = r'"stablehlo\.(?:reduce_scatter|all_reduce)".*?\}\) : \(tensor<(?:\d+x)*(\w+)>'
    return set(re.findall(pattern, text, re.DOTALL))
