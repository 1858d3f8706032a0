"""Collectives of a step are those predicted, under any optimizer, and one too many or too few is found."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.parallel import DataParallelConfig, FSDPConfig, Model
from spmdkit.parallel.collectives import Collective, differing
from spmdkit.parallel.step import train_step as step_file
from spmdkit.parallel.verification.collective_check import check_collectives, combines_elements
from spmdkit.parallel.verification.fewer_collectives import UnneededGradients, explain_fewer
from spmdkit.training.optimizing.optimizers import OptimizerConfig, make_optimizer
from support import toy

pytestmark = pytest.mark.slow_except(
    "test_detects_optimizer_that_combines_elements",
    "test_either_figure_makes_a_difference",
    "test_compares_no_bytes_of_shards_that_xla_moves",
    "test_finds_extra_collective_in_update",
    "test_explains_collectives_that_xla_merged_and_that_move_more",
)

WIDTH = 128
STRATEGIES = {
    "zero 1": {"data": DataParallelConfig(size=2, zero=1, floor_bytes=1)},
    "zero 2": {"data": DataParallelConfig(size=2, zero=2, floor_bytes=1)},
    "fsdp": {"fsdp": FSDPConfig(size=2, floor_bytes=1)},
}


def init(key):
    return {"up": jnp.full((WIDTH, WIDTH), 0.1), "down": jnp.full((WIDTH, WIDTH), 0.1), "bias": jnp.zeros(WIDTH)}


def loss(params, batch, key):
    hidden = jnp.tanh(batch["inputs"] @ params["up"] + params["bias"][None])
    return toy.cross_entropy(hidden @ params["down"], batch)


def frozen_loss(params, batch, key):
    """The lower matrix is read and not trained, the bias is not read."""
    hidden = jnp.tanh(batch["inputs"] @ lax.stop_gradient(params["up"]))
    return toy.cross_entropy(hidden @ params["down"], batch)


MODEL, FROZEN = Model(init=init, loss=loss), Model(init=init, loss=frozen_loss)
BATCH = {"inputs": jnp.ones((4, WIDTH)), "targets": jnp.zeros(4, jnp.int32), "weights": jnp.ones(4)}


@cache
def optimizer(name):
    if name == "frozen":
        labels = {"up": "no", "down": "yes", "bias": "yes"}
        return optax.partition({"yes": optax.adamw(1e-3), "no": optax.set_to_zero()}, labels)
    shapes = jax.eval_shape(init, jax.random.key(0))
    return make_optimizer(OptimizerConfig(name=name, learning_rate=1e-3), 10, shapes, stacked=False)


def step_of(name, strategy, model=MODEL):
    return toy.build(STRATEGIES[strategy], optimizer(name), model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["muon", "adafactor", "frozen"])
def test_attributes_optimizer_collectives_to_xla(name, strategy):
    step = step_of(name, strategy)
    result = check_collectives(step, BATCH)
    assert result.unexpected == ()
    assert bool(result.left_to_xla) == (name != "frozen")
    assert combines_elements(step) == (name != "frozen")


def gradients(model, zero=()):
    """Gradients of one device, of which some are zero."""
    shapes = leaves_with_paths(jax.eval_shape(model.init, jax.random.key(0)))
    random = np.random.default_rng(0)
    return {path: np.zeros(leaf.shape) if path in zero else random.normal(size=leaf.shape) for path, leaf in shapes}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_names_gradients_that_are_zero_as_the_cause_of_fewer_collectives(strategy):
    step = step_of("adamw", strategy, FROZEN)
    result = check_collectives(step, BATCH, gradients(FROZEN, zero=("up", "bias")))
    assert result.unexpected == ()
    text = next(text for text in result.fewer if text.startswith("reduce-scatter"))
    assert text.endswith("XLA removed those of bias, up: on one device, these gradients are zero")
    assert result.verdict == "fewer than predicted"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fewer_collectives_are_a_remark_that_names_candidates_by_their_bytes(strategy):
    result = check_collectives(step_of("adamw", strategy, FROZEN), BATCH)
    assert result.unexpected == ()
    assert any(text.startswith("reduce-scatter") and "XLA merged or removed some" in text for text in result.fewer)


def test_names_equal_gradients_that_xla_merged():
    """The bias of a layer before and after a sum has the same gradient, as in the skips of a U-Net."""

    def summed_loss(params, batch, key):
        hidden = jnp.tanh(batch["inputs"] @ params["up"])
        return toy.cross_entropy(hidden @ params["down"] + params["first"][None] + params["second"][None], batch)

    def init_sum(key):
        bias = jnp.zeros(WIDTH)
        return {**init(key), "first": bias, "second": bias}

    model = Model(
        init=lambda key: {name: leaf for name, leaf in init_sum(key).items() if name != "bias"}, loss=summed_loss
    )
    step = toy.build({"data": 4}, optax.adamw(1e-3), model)
    equal = gradients(model)
    equal["second"] = equal["first"]
    result = check_collectives(step, BATCH, equal)
    assert result.unexpected == ()
    (text,) = result.fewer
    assert text.endswith("XLA merged gradients that are equal on one device: first and second")


@pytest.mark.slow
def test_sums_that_xla_merges_are_a_remark():
    """Without a loop, the sums of two blocks do not depend on each other."""
    model = replace(toy.BLOCK_MODEL, scan_unroll=toy.BLOCK_MODEL.num_blocks)
    step = toy.build({"data": DataParallelConfig(size=4, reduce="overlapped")}, optax.adamw(1e-3), model)
    result = check_collectives(step, toy.batch(0))
    assert result.unexpected == ()
    (text,) = result.fewer
    assert text.endswith("XLA merged 2 with others, and moves the same bytes")


def test_names_what_xla_merged():
    """The same bytes in fewer collectives."""
    predicted = [Collective("all-reduce", ("data",), 3, 96)]
    found = [Collective("all-reduce", ("data",), 2, 96)]
    text = explain_fewer(predicted[0].key, predicted, found, lambda paths: predicted, [], UnneededGradients())
    assert text == "XLA merged 1 with others, and moves the same bytes"


def test_explains_collectives_that_xla_merged_and_that_move_more():
    """Bytes are not compared over axes that are left to XLA, which may move more of them in fewer collectives."""
    predicted = [Collective("all-gather", ("tensor",), 3, 96)]
    found = [Collective("all-gather", ("tensor",), 2, 128)]
    text = explain_fewer(predicted[0].key, predicted, found, lambda paths: predicted, ["up"], UnneededGradients())
    assert text == "XLA merged 1 with others, and moves 32 B more"


@pytest.mark.parametrize("figure", ["count", "bytes"])
def test_either_figure_makes_a_difference(figure):
    line = Collective("all-reduce", ("data",), 2, 64)
    other = replace(line, **{figure: 1})
    assert differing([line], [line]) == {}
    assert differing([line], [other]).keys() == {line.key}
    assert differing([line], [other], {"count", "bytes"} - {figure}) == {}


def test_compares_no_bytes_of_shards_that_xla_moves():
    """Both axes split one dim, so a gather over one of them moves more than its shards."""
    strategy = {"fsdp": FSDPConfig(size=2, floor_bytes=512), "tensor": {"size": 2, "explicit": False}}
    rules = {"blocks/down": (None, None, ("tensor", "fsdp"))}
    result = check_collectives(toy.build(strategy, rules=rules), toy.batch(0))
    assert set(result.predicted) - set(result.found), "the bytes differ"
    assert result.unexpected == ()


def test_accepts_partly_frozen_block():
    def block(params, x, key):
        return toy.block({**params, "up": lax.stop_gradient(params["up"])}, x, key)

    model = replace(toy.BLOCK_MODEL, block=block)
    step, batch = toy.build(STRATEGIES["fsdp"], optax.adamw(1e-3), model), toy.batch(0, rows=4)
    result = check_collectives(step, batch, gradients(model, zero=("blocks/up",)))
    assert result.unexpected == ()
    assert "XLA removed those of blocks/up" in " ".join(result.fewer)
    assert "blocks/scale" not in " ".join(
        check_collectives(step, batch, gradients(model, zero=("blocks/scale",))).fewer
    )


def test_reports_missing_collective_under_optimizer_that_combines_elements():
    result = check_collectives(step_of("muon", "fsdp", FROZEN), BATCH)
    assert result.unexpected == ()
    (text,) = result.fewer
    assert text.startswith("reduce-scatter over fsdp")


def test_finds_extra_collective_in_update(monkeypatch):
    right = step_file.Step._step

    def wrong(step, *given):
        state, metrics = right(step, *given)
        whole = lax.with_sharding_constraint(state.opt_state, step.plan.replicated())
        least = sum(jnp.sort(leaf, axis=None)[0] for leaf in jax.tree.leaves(whole) if leaf.ndim == 2)
        return state, metrics._replace(weight=metrics.weight + 0 * least)

    monkeypatch.setattr(step_file.Step, "_step", wrong)
    assert any(
        "all-gather over data" in text for text in check_collectives(step_of("adamw", "zero 1"), BATCH).unexpected
    )


def test_finds_misplaced_optimizer_state(monkeypatch):
    """One that treats every element by itself moves nothing, unless its state lies where its parameter does not."""
    right = step_file.resolve_optimizer_state

    def wrong(*given):
        table = right(*given)
        rows = [type(row)(**{**vars(row), "layout": replicated(row.layout)}) for row in table.rows]
        return type(table)(rows=tuple(rows), treedef=table.treedef, mesh=table.mesh)

    monkeypatch.setattr(step_file, "resolve_optimizer_state", wrong)
    texts = check_collectives(step_of("adamw", "fsdp"), BATCH).unexpected
    assert any(text.startswith("all-gather over fsdp") for text in texts)


def replicated(layout):
    return type(layout)((None,) * len(layout.axes), layout.device_mesh)


ACROSS = optax.stateless(
    lambda updates, params: jax.tree.map(lambda leaf: leaf - leaf.mean(axis=0, keepdims=True), updates)
)
SORTED = optax.stateless(lambda updates, params: jax.tree.map(lambda leaf: jnp.sort(leaf, axis=0), updates))


@pytest.mark.parametrize(
    ("optimizer", "across"), [(optax.adamw(1e-3), False), (ACROSS, True), (SORTED, True)], ids=["adam", "mean", "sort"]
)
def test_detects_optimizer_that_combines_elements(optimizer, across):
    """Operations that change shapes, and those that do not and look across all the same."""
    assert combines_elements(toy.build(STRATEGIES["fsdp"], optimizer, MODEL)) == across
