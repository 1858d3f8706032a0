"""Optimizers that ask for the loss get it, the same on every mesh; those that break the rules get a sentence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import FSDPConfig, build_step, lay_out
from spmdkit.parallel.step.state import StepMetrics
from spmdkit.parallel.step.update import _shared_metrics, dims_of_blocks
from support import toy

STEPS = 4
MESHES = {
    "one device": {"data": 1},
    "data x fsdp": {"data": 2, "fsdp": FSDPConfig(size=2, floor_bytes=0)},
    "zero": {"data": {"size": 2, "zero": 1, "floor_bytes": 0}},
}


def plateau():
    """Halves the rate whenever the loss did not fall by a tenth: with every step, near enough."""
    return optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.1))


def polyak():
    return optax.polyak_sgd(max_learning_rate=0.1)


def wants_gradient():
    """Moves against the gradient that it asks for by name, by as much as the loss."""

    def update(updates, state, params=None, *, value, grad, **extra):
        return jax.tree.map(lambda leaf: -0.01 * value * leaf, grad), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


OPTIMIZERS = {"reduce_on_plateau": plateau, "polyak": polyak, "grad": wants_gradient}


def by_hand(optimizer):
    """The same steps without the runtime, the loss given as optax's documentation says."""
    params = jax.device_get(build_step(toy.PLAIN_MODEL, optimizer, lay_out(toy.PLAIN_MODEL, toy.mesh(data=1))).init(0))
    params, state = params.params, optimizer.init(params.params)
    clip = optax.clip_by_global_norm(0.5)

    @jax.jit
    def step(params, state, batch):
        def mean(params):
            total, weight = toy.PLAIN_MODEL.loss(params, batch, None)
            return total / weight

        value, gradients = jax.value_and_grad(mean)(params)
        gradients, _ = clip.update(gradients, optax.EmptyState())
        updates, state = optimizer.update(gradients, state, params, value=value, grad=gradients)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        params, state = step(params, state, toy.batch(0))
    return params, state


@pytest.fixture(scope="module")
def expected():
    return {name: by_hand(make_optimizer()) for name, make_optimizer in OPTIMIZERS.items()}


@pytest.mark.slow
@pytest.mark.long_cases("one device-reduce_on_plateau")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy", MESHES.values(), ids=MESHES)
def test_the_loss_is_given_on_every_mesh(expected, strategy, name):
    step = toy.build(strategy, OPTIMIZERS[name](), toy.PLAIN_MODEL, clip_norm=0.5)
    state = step.init(0)
    for _ in range(STEPS):
        state, _ = step(state, toy.batch(0))
    params, opt_state = expected[name]
    errors = jax.tree.map(toy.relative, (state.params, state.opt_state), (params, opt_state))
    assert max(jax.tree.leaves(errors)) < 1e-4, errors
    if name == "reduce_on_plateau":
        assert 0 < float(state.opt_state[1].scale) < 1  # it has seen a loss that did not fall


@pytest.mark.slow
def test_local_steps_give_each_group_the_loss_of_its_own_rows():
    step = toy.build({"data": {"size": 2, "local_steps": 4}}, wants_gradient(), toy.PLAIN_MODEL)
    state, batch = step.init(0), toy.batch(0)
    params = jax.device_get(state.params)
    after = jax.device_get(step(state, batch)[0].extra.copies)
    for group in range(2):
        rows = {name: array[group * 8 : (group + 1) * 8] for name, array in batch.items()}

        def mean(params, rows=rows):
            total, weight = toy.PLAIN_MODEL.loss(params, rows, None)
            return total / weight

        value, gradients = jax.jit(jax.value_and_grad(mean))(params)
        wanted = jax.tree.map(lambda leaf, g, value=value: leaf - 0.01 * value * g, params, gradients)
        errors = jax.tree.map(lambda ours, theirs, group=group: toy.relative(ours[group], theirs), after, wanted)
        assert max(jax.tree.leaves(errors)) < 1e-6


def test_groups_share_their_mean_loss_and_the_mean_of_their_norms():
    of_groups = StepMetrics(*np.float32([[1, 4], [3, 5], [1, 3]]))
    found = jax.vmap(partial(_shared_metrics, reduce_dtype="float32"), axis_name="data")(of_groups)
    assert [each.tolist() for each in found[:3]] == [[3.25, 3.25], [4, 4], [4, 4]]


def broken(update, init=lambda params: optax.EmptyState()):
    return optax.GradientTransformation(init, update)


def counts(params):
    return {"count": jnp.zeros((), jnp.int32)}


def asks_python(updates, state, params=None):
    return (updates if state["count"] > 3 else jax.tree.map(jnp.zeros_like, updates)), {"count": state["count"] + 1}


REFUSED = {
    "lbfgs": (optax.lbfgs(), "needs 'value_fn', which a step does not have.*linesearch=None"),
    "line search": (
        optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)),
        "needs 'value_fn', which a step does not have.*runs the model once.*linesearch=None",
    ),
    "None": (broken(lambda g, s, p=None: None), r"must return \(updates, state\), but it returned a NoneType"),
    "part": (
        broken(lambda g, s, p=None: ({"head": g["head"]}, s)),
        "returned updates in which 'blocks/down' is missing",
    ),
    "more": (broken(lambda g, s, p=None: ({**g, "x": 0.0}, s)), r"'x' is of shape \[\], expected missing"),
    "shape": (
        broken(lambda g, s, p=None: (jax.tree.map(lambda leaf: leaf.sum(), g), s)),
        r"'blocks/down' is of shape \[\], expected of shape \[3, 64, 16\]",
    ),
    "state": (broken(lambda g, s, p=None: (g, {}), counts), "returned a state in which 'count' is missing"),
    "state's dtype": (
        broken(lambda g, s, p=None: (g, {"count": s["count"] + 0.5}), counts),
        r"a state in which 'count' is float32\[\], expected int32\[\]",
    ),
    "Python": (broken(asks_python, counts), "needs the value of an array in Python.*jnp.where or jax.lax.cond"),
    "text": (
        broken(lambda g, s, p=None: (g, s), lambda params: {"mode": "fast"}),
        "init returned something other than an array: .*'str'.*'mode'",
    ),
}


@pytest.mark.parametrize(("optimizer", "message"), REFUSED.values(), ids=REFUSED)
def test_rejects_unsupported_optimizers(optimizer, message):
    step = toy.build({"data": 1}, optimizer, toy.PLAIN_MODEL)
    with pytest.raises(UserError, match=message):
        step.lower(toy.abstract(toy.batch(0)))


def test_keeps_errors_of_the_optimizer():
    def update(updates, state, params=None):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        toy.build({"data": 1}, broken(update), toy.PLAIN_MODEL).lower(toy.abstract(toy.batch(0)))


def preconditioned():
    """Keeps a matrix of products of all blocks, and a number of no block."""

    def start(params):
        (up,) = jax.tree.leaves(params["blocks"])
        return {"products": jnp.zeros((len(up), len(up))), "blocks": jnp.zeros(up.shape[1])}

    return optax.GradientTransformation(start, lambda updates, state, params=None: (updates, state))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.sgd(0.1, momentum=0.9), {"0/trace/blocks/up": (0,)}),
        (optax.sgd(0.1), {}),
        (
            optax.scale_by_factored_rms(min_dim_size_to_factor=4),
            {"v_row/blocks/up": (0,), "v_col/blocks/up": (0,)},
        ),
        (preconditioned(), {"products": (0, 1)}),
    ],
    ids=["momentum", "no state", "factored", "products"],
)
@pytest.mark.parametrize("width", [4, 6])
def test_finds_the_dims_of_a_state_that_count_blocks(optimizer, expected, width):
    """Also if another dim has the same size, here 4."""
    shapes = {"blocks": {"up": (4, width, 8)}, "head": {"out": (4, 4)}}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda node: isinstance(node, tuple)
    )
    assert dims_of_blocks(optimizer, params, 4) == expected
