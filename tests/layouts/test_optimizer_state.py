"""Optimizer state: slots lie as their parameter in any optax optimizer, everything else is whole."""

import jax
import jax.numpy as jnp
import optax
import pytest
from spmdkit.layouts import LayoutMap, LayoutTable, TensorLayout, resolve, resolve_optimizer_state

PARAMS = {
    "embed": jax.ShapeDtypeStruct((256, 128), jnp.float32),
    "block": {"w": jax.ShapeDtypeStruct((128, 256), jnp.float32), "norm": jax.ShapeDtypeStruct((128,), jnp.float32)},
    "w": jax.ShapeDtypeStruct((128, 256), jnp.float32),  # path and shape also end "block/w"
}


@pytest.fixture
def table(canonical) -> LayoutTable:
    rules = LayoutMap(canonical)
    rules["embed"], rules["block/w"], rules["w"] = ("fsdp", None), (None, "fsdp"), ("data", "fsdp")
    rules["block/norm"] = (None,)
    return resolve(PARAMS, canonical, rules=rules)


def is_matrix(params):
    return jax.tree.map(lambda leaf: len(leaf.shape) == 2, params)


def labels(params):
    return jax.tree.map(lambda leaf: "adam" if len(leaf.shape) == 2 else "sgd", params)


OPTIMIZERS = {
    # name: (optimizer, slots a matrix has, slots a vector has)
    "sgd": (optax.sgd(0.1), 0, 0),
    "momentum": (optax.sgd(0.1, momentum=0.9), 1, 1),
    "adam": (optax.adam(1e-3), 2, 2),
    "deeply chained": (optax.chain(optax.chain(optax.trace(0.9), optax.scale_by_adam()), optax.scale(-1.0)), 3, 3),
    "masked": (optax.chain(optax.masked(optax.scale_by_adam(), is_matrix), optax.trace(0.9)), 3, 1),
    "partitioned": (optax.partition({"adam": optax.adam(1e-3), "sgd": optax.sgd(0.1, 0.9)}, labels), 2, 1),
    "injected": (optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), 2, 2),
    "accumulated": (optax.MultiSteps(optax.adam(1e-3), 2), 3, 3),
    "schedule free": (optax.contrib.schedule_free_adamw(1e-3), 2, 2),
}


def rows_like(state_table: LayoutTable, path: str) -> list:
    return [row for row in state_table.rows if row.rule == "like its parameter" and row.path.endswith(path)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_follow_their_parameter(table, name):
    optimizer, in_matrix, in_vector = OPTIMIZERS[name]
    state = resolve_optimizer_state(jax.eval_shape(optimizer.init, PARAMS), table)
    counts = {path: len(rows_like(state, path)) for path in ("embed", "block/w", "block/norm")}
    assert counts == {"embed": in_matrix, "block/w": in_matrix, "block/norm": in_vector}
    for path in ("embed", "block/w", "block/norm"):
        assert {row.layout for row in rows_like(state, path)} <= {table.row(path).layout}
    top = [row for row in rows_like(state, "/w") if not row.path.endswith("block/w")]
    assert [row.layout.axes for row in top] == [("data", "fsdp")] * in_matrix  # "w", not "block/w"
    others = [row for row in state.rows if row.rule != "like its parameter"]
    assert all(row.rule == "replicated: scalar" and row.layout.axes == () for row in others)


def test_factored_moments_are_whole(table):
    state = resolve_optimizer_state(jax.eval_shape(optax.adafactor(1e-3).init, PARAMS), table)
    factored = [row for row in state.rows if "/v_row/embed" in row.path or "/v_col/embed" in row.path]
    assert {row.shape for row in factored} == {(256,), (128,)}
    assert {row.rule for row in factored} == {"replicated: no parameter of this path and shape"}
    assert all(row.layout.axes == (None,) and row.layout.device_mesh == table.mesh for row in factored)
    assert len(rows_like(state, "/v/block/norm")) == 1  # vectors are not factored


def test_a_parameter_named_as_a_slot(canonical):
    params = {"w": jax.ShapeDtypeStruct((8, 4), "float32"), "mu": {"w": jax.ShapeDtypeStruct((8, 4), "float32")}}
    rules = LayoutMap(canonical)
    rules["w"], rules["mu/w"] = ("fsdp", None), (None, "fsdp")
    table = resolve(params, canonical, rules=rules)
    state = resolve_optimizer_state(jax.eval_shape(optax.adam(1e-3).init, params), table)
    assert state.row("0/mu/w").layout.axes == ("fsdp", None)
    assert state.row("0/mu/mu/w").layout.axes == (None, "fsdp")


def test_a_single_array_as_parameters(canonical):
    params = jax.ShapeDtypeStruct((8,), "float32")
    table = resolve(params, canonical, default=lambda *_: (TensorLayout(("fsdp",), canonical), "fsdp"))
    state = resolve_optimizer_state(jax.eval_shape(optax.adam(1e-3).init, params), table)
    assert [row.layout.axes for row in state.rows] == [(), ("fsdp",), ("fsdp",)]
