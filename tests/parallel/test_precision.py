"""Floating-point inputs are cast to the compute dtype beside the parameters; weights and targets lose no bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import BlockModel, FSDPConfig, Model, Precision, build_step, lay_out, verify
from spmdkit.parallel import options as dtypes
from support import toy

ROWS, SIZE, CHANNELS, CLASSES = 16, 4, 3, 8
STRATEGIES = {
    "fsdp": {"fsdp": FSDPConfig(size=4, floor_bytes=0)},
    "data x fsdp": {"data": 2, "fsdp": FSDPConfig(size=2, floor_bytes=0)},
}


def init(key):
    first, second = jax.random.split(key)
    return {
        "kernel": 0.2 * jax.random.normal(first, (3, 3, CHANNELS, CLASSES)),
        "out": 0.2 * jax.random.normal(second, (CLASSES, CLASSES)),
    }


def loss(params, batch, key):
    """A convolution, which takes operands of one dtype alone, and a softmax."""
    numbers = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(batch["inputs"], params["kernel"], (1, 1), "SAME", dimension_numbers=numbers)
    logits = (jax.nn.relu(y).mean((1, 2)) @ params["out"]).astype(jnp.promote_types(y.dtype, "float32"))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (losses * batch["weights"]).sum(), batch["weights"].sum()


CONVOLUTION = Model(init=init, loss=loss)


def images(seed):
    random = np.random.default_rng(seed)
    return {
        "inputs": random.normal(size=(ROWS, SIZE, SIZE, CHANNELS)).astype(np.float32),
        "targets": random.integers(0, CLASSES, ROWS).astype(np.int32),
        "weights": random.random(ROWS).astype(np.float32),
        "example": np.arange(ROWS, dtype=np.int32),
    }


@pytest.mark.slow_cases("data x fsdp", "fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_convolution_is_verified_in_float64(strategy):
    result = verify(CONVOLUTION, strategy, [images(0), images(1)], devices=toy.devices(4))
    assert result.ok, str(result)
    assert result.gradients[0].relative < 1e-9


@pytest.mark.slow_cases("{'data': {'size': 2, 'local_steps': 2}}", "{'pipe': {'size': 3, 'microbatches': 3}}")
@pytest.mark.parametrize(
    "strategy",
    [
        {"pipe": {"size": 3, "microbatches": 3}},
        {"data": {"size": 2, "local_steps": 2}},
        {"data": {"size": 2, "compress": "int8"}},
        {"data": {"size": 1}},
    ],
    ids=str,
)
def test_every_way_of_running_a_model_casts(strategy):
    seen = []

    def embed(groups, batch, key):
        seen.append({name: str(rows.dtype) for name, rows in batch.items()})
        return batch["inputs"] @ groups["embed"]["table"]

    table = {"table": jnp.eye(toy.WIDTH)}
    model = BlockModel(
        init=lambda key: {**toy.init(key), "embed": table}, embed=embed, block=toy.block, head=toy.head, num_blocks=3
    )
    batch = {**toy.batch(0, rows=12), "inputs": np.ones((12, toy.LENGTH, toy.WIDTH), np.float32)}
    precision = Precision(compute="bfloat16")
    [options] = strategy.values()
    layouts = lay_out(model, strategy, precision=precision, devices=toy.devices(options["size"]))
    step = build_step(model, optax.sgd(0.1), layouts, precision=precision)
    abstract = toy.abstract(batch)
    step.lower(abstract)
    jax.eval_shape(step.gradients, step.abstract_state(), abstract)
    jax.eval_shape(step.evaluate, step.abstract_state().params, abstract)
    step.cost(abstract)
    wanted = {"inputs": "bfloat16", "targets": "int32", "weights": "float32", "example": "int32"}
    assert len(seen) >= 3
    assert all(each == wanted for each in seen), seen


@pytest.mark.parametrize(
    ("compute", "counted"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_weights_and_targets_are_not_narrowed(compute, counted, float64):
    batch = {name: jnp.ones(4, "float32") for name in ("inputs", "targets", "weights", "noise")}
    cast = dtypes.cast_inputs({**batch, "ids": jnp.arange(4, dtype="int32")}, compute)
    assert {name: str(rows.dtype) for name, rows in cast.items()} == {
        "inputs": compute,
        "noise": compute,
        "targets": counted,
        "weights": counted,
        "ids": "int32",
    }
    labels = dtypes.cast_inputs(
        {"targets": jnp.arange(4, dtype="int32"), "weights": jnp.arange(4, dtype="int32")}, compute
    )
    assert {str(rows.dtype) for rows in labels.values()} == {"int32"}
