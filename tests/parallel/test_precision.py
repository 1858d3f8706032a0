"""Floating-point inputs are cast to the compute dtype beside the parameters; weights and targets lose no bits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.parallel import Precision
from spmdkit.parallel import options as dtypes
from support import toy


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
    model = replace(toy.BLOCK_MODEL, init=lambda key: {**toy.init(key), "embed": table}, embed=embed)
    batch = {**toy.batch(0, rows=12), "inputs": np.ones((12, toy.LENGTH, toy.WIDTH), np.float32)}
    step, abstract = toy.build(strategy, model=model, precision=Precision(compute="bfloat16")), toy.abstract(batch)
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
