"""A model with batch norm: its statistics, its metrics and its state are those of one device, on every mesh."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import FSDPConfig, LossSums, Model, batch_axes, verify
from spmdkit.parallel.sharding.model_errors import ModelError, abstract_state, check_loss
from support import toy

WIDTH, ROWS = 8, 16
FSDP = FSDPConfig(size=4, floor_bytes=1)
BOTH = {"data": 2, "fsdp": FSDPConfig(size=2, floor_bytes=1)}
MESHES = {"data": {"data": 4}, "fsdp": {"fsdp": FSDP}, "data x fsdp": BOTH}


def init(key):
    first, second = jax.random.split(key)
    return {"up": jax.random.normal(first, (4, WIDTH)), "down": jax.random.normal(second, (WIDTH,))}


def init_state(key):
    return {"mean": jnp.zeros(WIDTH), "square": jnp.ones(WIDTH), "batches": jnp.int32(0)}


def loss(params, batch, key, state, axes=batch_axes):
    x = batch["inputs"] @ params["up"]
    mean, square = state["mean"], state["square"]
    if key is not None:
        mean, square = (lax.pmean(each.mean(0), axes()) for each in (x, x * x))
        state = {
            "mean": 0.9 * state["mean"] + 0.1 * mean,
            "square": 0.9 * state["square"] + 0.1 * square,
            "batches": state["batches"] + 1,
        }
    error = jnp.tanh((x - mean[None]) / jnp.sqrt(square - mean**2 + 1e-5)[None]) @ params["down"] - batch["targets"]
    weights = batch["weights"]
    near = (abs(error) < 0.5).astype(weights.dtype)
    return LossSums(weights @ error**2, weights.sum(), {"near": (weights @ near, weights.sum())}, state)


MODEL = Model(init=init, loss=loss, init_state=init_state, name="norm")


def batch(seed):
    random = np.random.default_rng(seed)
    arrays = {"inputs": random.normal(size=(ROWS, 4)), "targets": random.normal(size=ROWS)}
    return {**arrays, "weights": random.uniform(0.5, 1.5, ROWS), "example": np.arange(ROWS, dtype=np.int32)}


@cache
def plain_steps(accumulate):
    """Two steps and an evaluation in plain JAX: microbatch k takes rows k, k + n, k + 2 n, ... of the batch."""
    with jax.enable_x64(True):
        params, state = jax.device_get((init(jax.random.key(0)), init_state(None)))
        params, state = (
            jax.tree.map(lambda x: x.astype(float) if x.dtype.kind == "f" else x, t) for t in (params, state)
        )
        start, losses, near = params, [], []
        for seed in range(2):
            total = weight = hits = 0
            gradients = jax.tree.map(np.zeros_like, params)
            for first in range(accumulate):
                rows = {name: array[first::accumulate] for name, array in batch(seed).items()}

                def one(params, rows=rows, state=state):
                    found = loss(params, rows, 0, state, axes=lambda: ())
                    return found.total, found

                (_, found), new = jax.jit(jax.value_and_grad(one, has_aux=True))(params)
                state, total, weight = found.state, total + found.total, weight + found.weight
                hits += found.metrics["near"][0]
                gradients = jax.tree.map(np.add, gradients, new)
            losses.append(float(total / weight))
            near.append(float(hits / weight))
            params = jax.tree.map(lambda p, g, w=weight: p - 0.1 * g / w, params, gradients)
        final = loss(params, batch(2), None, state, axes=lambda: ())
        return start, losses, near, jax.device_get(state), [float(final.total), float(final.metrics["near"][0])]


def steps_on(mesh, accumulate, model=MODEL):
    start, *_ = plain_steps(accumulate)
    with jax.enable_x64(True):
        step = toy.build(MESHES[mesh], model=model, accumulate=accumulate, precision=toy.FLOAT64)
        state, losses, near = step.init(0, params=start), [], []
        for seed in range(2):
            state, metrics = step(state, batch(seed))
            losses.append(float(metrics.loss))
            near.append(float(metrics.model["near"]))
        sums = step.measure(state.params, batch(2), state.model_state)
        return losses, near, jax.device_get(state.model_state), [float(sums.total), float(sums.metrics["near"][0])]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_equals_one_device(mesh, accumulate):
    _, *expected = plain_steps(accumulate)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-12),
        steps_on(mesh, accumulate),
        tuple(expected),
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_microbatches_are_every_nth_row_of_all_devices(devices):
    """The state, of each device's own rows, is the mean of the latest microbatch: the rows 1, 3, ... 15."""

    def latest(params, batch, key, state):
        return LossSums(batch["x"].sum() * params["w"], batch["x"].sum(), {}, {"mean": batch["x"].mean()})

    own = Model(init=lambda key: {"w": jnp.ones(())}, loss=latest, init_state=lambda key: {"mean": jnp.zeros(())})
    step = toy.build({"data": devices}, model=own, accumulate=2)
    state, _ = step(step.init(0), {"x": np.arange(ROWS, dtype=np.float32)})
    assert float(state.model_state["mean"]) == 8


def test_statistics_of_a_device_alone_are_averaged_and_the_loss_is_another():
    alone = Model(init=init, init_state=init_state, loss=lambda *given: loss(*given, axes=lambda: ()))
    _, losses, _, state, _ = plain_steps(1)
    found, _, averaged, _ = steps_on("data", 1, alone)
    assert abs(found[0] - losses[0]) > 1e-3
    np.testing.assert_allclose(
        averaged["mean"], state["mean"], atol=0.01
    )  # another course, yet every device's rows in it
    assert averaged["batches"] == 2


@pytest.mark.slow
def test_verify_finds_a_state_that_is_not_of_all_rows():
    def wrong(params, rows, key, state):
        found = loss(params, rows, key, state)
        own = rows["inputs"].sum()  # the mean over devices is kept, and one device has the sum
        return found._replace(state={**found.state, "mean": found.state["mean"] + own})

    result = verify(
        Model(init=init, loss=wrong, init_state=init_state), {"data": 4}, [batch(0)], devices=toy.devices(4)
    )
    assert result.first_difference is not None
    assert (result.first_difference.what, result.first_difference.where) == ("the model's state", "mean")


def test_evaluation_requires_the_state():
    step = toy.build({"data": 2}, model=MODEL)
    state = step.init(0)
    with pytest.raises(UserError, match=r"needs\. Pass it too: step\.evaluate\(state\.params, batch, state\.model_"):
        step.evaluate(state.params, batch(0))


def test_a_step_whose_gradients_are_not_finite_leaves_the_state():
    step = toy.build({"data": 2}, model=MODEL)
    state = step.init(0)
    before = jax.device_get(state.model_state)
    rows = {name: array.astype("float32") if array.dtype == float else array for name, array in batch(0).items()}
    after, metrics = step(state, {**rows, "inputs": rows["inputs"] * np.float32("nan")})
    assert not np.isfinite(float(metrics.grad_norm))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.model_state), before)


def test_local_steps_and_a_state_do_not_combine():
    with pytest.raises(UserError, match=r"model 'norm' has a state .* Set strategy\.data\.local_steps to 0"):
        toy.plan({"data": {"size": 2, "local_steps": 2}}, MODEL)


@pytest.mark.parametrize(
    ("state", "told"),
    [(lambda key: {"key": key}, "key is a random key"), (lambda key: {"count": 0}, "count is 0 of type int")],
)
def test_rejects_invalid_states(state, told):
    with pytest.raises(ModelError, match=f"returns values that are not arrays of numbers: {told}"):
        abstract_state(Model(init=init, loss=loss, init_state=state))


def test_rejects_losses_without_the_next_state():
    model = Model(init=init, init_state=init_state, loss=lambda *given: tuple(loss(*given)[:2]))
    shapes = {name: jax.ShapeDtypeStruct(array.shape, "float32") for name, array in batch(0).items()}
    with pytest.raises(ModelError, match="returns a state in which 'batches' is missing"):
        check_loss(model, shapes)
    with pytest.raises(ModelError, match=r"cannot be called with \(params, batch, key, state\)"):
        check_loss(Model(init=init, init_state=init_state, loss=lambda params, batch, key: None), shapes)
