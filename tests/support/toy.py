"""A small model with blocks and a plain one, for tests of the runtime alone."""

import re
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel import BlockModel, Model, Precision, build_step, lay_out

WIDTH, VOCABULARY, BLOCKS = 16, 32, 3
ROWS, LENGTH = 16, 8
SGD, FLOAT32 = optax.sgd(0.1), Precision()
FLOAT64 = Precision(params="float64", compute="float64", reduce="float64")


def init(key):
    """Other numbers for each key, of operations that compile in a third of the time of `drawn`."""
    seed = jax.random.key_data(key)[-1]

    def hashed(number, *shape):
        bits = jnp.arange(prod(shape), dtype=jnp.uint32) + (seed * jnp.uint32(4) + jnp.uint32(number)) * jnp.uint32(
            7919
        )
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
        return 0.35 * (((bits ^ (bits >> 16)) >> 8).astype(jnp.float32) * 2.0**-24 - 0.5).reshape(shape)

    return parameters(hashed)


def drawn(key):
    """As users draw parameters: for tests of drawing itself."""
    keys = jax.random.split(key, 4)
    return parameters(lambda number, *shape: jax.random.normal(keys[number], shape) * 0.1)


def first_params(model=None):
    """NumPy parameters: where they are given, no program that draws them is compiled."""
    random, shapes = np.random.default_rng(0), jax.eval_shape((model or BLOCK_MODEL).init, jax.random.key(0))
    return jax.tree.map(lambda leaf: (0.1 * random.normal(size=leaf.shape)).astype(np.float32), shapes)


def on_one_device(model, batch, dtype="float32", key=None):
    """Given parameters, and the mean loss of a model and its gradients."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), first_params(model))
    loss = jax.value_and_grad(lambda params: model.loss(params, batch, key), has_aux=True)
    (total, weight), sums = jax.jit(loss)(params)
    return params, total / weight, jax.tree.map(lambda leaf: leaf / weight, sums)


def parameters(make):
    """The parameters, of `make(number, *shape)` for each that is not constant."""
    return {
        "embed": {"table": make(0, VOCABULARY, WIDTH)},
        "blocks": {
            "up": make(1, BLOCKS, WIDTH, 4 * WIDTH),
            "down": make(2, BLOCKS, 4 * WIDTH, WIDTH),
            "scale": jnp.ones((BLOCKS, WIDTH)),
        },
        "head": {"out": make(3, WIDTH, VOCABULARY)},
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
DRAWN_MODEL = BlockModel(init=drawn, embed=embed, block=block, head=head, num_blocks=BLOCKS)


def biased_init(key):
    """With additive biases of blocks: no backward pass needs them as they are."""
    params = init(key)
    return {
        **params,
        "blocks": {**params["blocks"], "b_up": 0 * params["blocks"]["up"][:, 0], "b": jnp.zeros((BLOCKS, WIDTH))},
    }


def biased_block(params, x, key):
    hidden = jnp.tanh((x * params["scale"][None, None]) @ params["up"] + params["b_up"][None, None])
    return x + hidden @ params["down"] + params["b"][None, None]


BIASED_MODEL = replace(BLOCK_MODEL, init=biased_init, block=biased_block)
PLAIN_MODEL = Model(init=init, loss=BLOCK_MODEL.loss)


def batch(seed, rows=ROWS, length=LENGTH, vocabulary=VOCABULARY):
    """Rows with ragged weights, so that no two shards or microbatches weigh the same."""
    random = np.random.default_rng(seed)
    return {
        "inputs": random.integers(0, vocabulary, (rows, length)).astype(np.int32),
        "targets": random.integers(0, vocabulary, (rows, length)).astype(np.int32),
        "weights": (random.random((rows, length)) < random.random((rows, 1))).astype(np.float32),
        "example": np.arange(rows, dtype=np.int32),
    }


def labelled(random, *shape, classes, dtype="float64"):
    """Rows of numbers, the first dim of `shape`, each with a class and a weight of 1."""
    return {
        "inputs": random.normal(size=shape).astype(dtype),
        "targets": random.integers(0, classes, shape[0]).astype(np.int32),
        "weights": np.ones(shape[0], dtype),
        "example": np.arange(shape[0], dtype=np.int32),
    }


def row_masks(batch, key, width):
    """Of a dropout that draws for each row from its own key."""
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(batch["example"])
    return jax.vmap(lambda own: jax.random.bernoulli(own, 0.8, (width,)))(keys)


def abstract(arrays):
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}


def mesh(**sizes):
    """A mesh over the first of the simulated devices."""
    count = int(np.prod(list(sizes.values())))
    return DeviceMesh.of(devices(count), **sizes)


def devices(count):
    """Names of the first simulated devices."""
    return [f"cpu:{index}" for index in range(count)]


def num_devices(strategy):
    """The devices of a strategy with a size for each of its axes."""
    sized = [each["size"] if isinstance(each, dict) else each for each in strategy.values()]
    return prod(getattr(each, "size", each) for each in sized)


def plan(strategy, model=BLOCK_MODEL, **options):
    """Lays out a model on as many simulated devices as the strategy has, unless it is a mesh itself."""
    own = devices(num_devices(strategy)) if isinstance(strategy, dict) else None
    return lay_out(model, strategy, devices=own, **options)


def build(strategy, optimizer=SGD, model=BLOCK_MODEL, *, rules=None, precision=FLOAT32, **options):
    """Builds the step of a model on as many simulated devices as the strategy has."""
    layouts = plan(strategy, model, rules=rules, precision=precision)
    return build_step(model, optimizer, layouts, precision=precision, **options)


def relative(value, reference):
    """The largest difference, relative to the largest element of the reference."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    return np.abs(value - reference).max() / max(np.abs(reference).max(), 1e-300)


def summed_dtypes(text):
    """What is summed over devices, by the types behind the function that adds two of them."""
    pattern = r'"stablehlo\.(?:reduce_scatter|all_reduce)".*?\}\) : \(tensor<(?:\d+x)*(\w+)>'
    return set(re.findall(pattern, text, re.DOTALL))


def with_options(plan, **options):
    """The plan with other options of the step."""
    return replace(plan, options=replace(plan.options, **options))
