"""Rules for activations: they take effect where the model names them, change no number, and fail loudly."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.layouts import LayoutError
from spmdkit.mesh.errors import UserError
from spmdkit.models import MLPConfig, TransformerConfig, mlp, transformer
from spmdkit.parallel import Model
from support import toy

from spmdkit import DeviceMesh, LayoutMap, ModelParallel, name_output

SEEN = []
"""Shardings of the activation, as the compiler has them: one for each device that reports."""


def block(params, x, key):
    """The toy's, its hidden activation named; whoever compiles it is told how that lies."""
    hidden = name_output(jnp.tanh((x * params["scale"][None, None]) @ params["up"]), "blocks/mlp/output")
    jax.debug.inspect_array_sharding(hidden, callback=SEEN.append)
    return name_output(x + hidden @ params["down"], "blocks/output")


NAMED = replace(toy.BLOCK_MODEL, block=block)
PLAIN = Model(init=toy.init, loss=NAMED.loss)
PARAMETERS = {"head/out": [None, "tensor"]}
MLP = {"blocks/mlp/output": [None, None, "tensor"]}


@pytest.fixture(autouse=True)
def forget():
    SEEN.clear()


def make(strategy, rules=None, model=NAMED):
    return toy.build(strategy, model=model, rules=rules)


def keras(axes=("batch", None, "model"), shape=(2, 2)):
    mesh = DeviceMesh(shape, ("batch", "model"), toy.devices(shape[0] * shape[1]))
    layout_map = LayoutMap(mesh)
    layout_map["head/out"] = (None, "model")
    layout_map["blocks/mlp/output"] = axes
    return ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def first_step(step):
    params = jax.tree.map(
        lambda leaf: 0.1 * np.random.default_rng(leaf.size).normal(size=leaf.shape), step.plan.table.abstract_arrays
    )
    state, metrics = step(step.init(0, params=params), toy.batch(0))
    return jax.device_get((state.params, metrics))


@pytest.fixture(scope="module")
def expected():
    """What one device makes of it, which ignores names."""
    return first_step(make({"data": 1}))


def split_dims(sharding):
    """The mesh axes left to XLA that split each dim, () for a whole one; a step is told of no others."""
    sizes = dict(sharding.mesh.shape)
    spec = [*sharding.spec, *(None,) * 3][:3]
    names = [() if each is None else each if isinstance(each, tuple) else (each,) for each in spec]
    return tuple(tuple(name for name in each if sizes[name] > 1) for each in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy", "axis"),
    [
        (NAMED, {"data": 2, "tensor": 2}, "tensor"),
        (PLAIN, {"tensor": 4}, "tensor"),
        (NAMED, keras(), "model"),
        (PLAIN, keras(shape=(1, 4)), "model"),
    ],
    ids=["data x tensor", "tensor alone", "ModelParallel", "ModelParallel without a split batch"],
)
def test_activation_has_the_layout_of_its_rule(expected, model, strategy, axis):
    rules = None if isinstance(strategy, ModelParallel) else {**PARAMETERS, **MLP}
    step = make(strategy, rules, model)
    found = first_step(step)
    assert SEEN
    assert {split_dims(each)[2] for each in SEEN} == {(axis,)}
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, found, expected))) < 1e-5
    without = {"head/out": [None, "tensor"]} if rules else None
    if without:
        SEEN.clear()
        first_step(make(strategy, without, model))
        assert {split_dims(each)[2] for each in SEEN} == {()}  # nothing else would split it


@pytest.mark.slow
def test_null_keeps_a_dim_whole():
    """Parameters that are split would leave the activation split, too."""
    split = {"blocks/up": [None, None, "tensor"], "blocks/down": [None, "tensor", None]}
    for rules, dims in (({}, ("tensor",)), ({"blocks/mlp/output": [None, None, None]}, ())):
        SEEN.clear()
        first_step(make({"data": 2, "tensor": 2}, {**split, **rules}))
        assert {split_dims(each)[2] for each in SEEN} == {dims}, rules


@pytest.mark.slow
def test_gradients_evaluation_and_microbatches_too(expected):
    step = make({"data": 2, "tensor": 2}, {**PARAMETERS, **MLP})
    state = step.init(0)
    for run in (
        lambda: step.gradients(state, toy.batch(0)),
        lambda: step.evaluate(state.params, toy.batch(0)),
        lambda: make({"data": 2, "tensor": 2}, {**PARAMETERS, **MLP}).lower(toy.abstract(toy.batch(0))).compile(),
    ):
        SEEN.clear()
        jax.block_until_ready(run())
        assert {split_dims(each)[2] for each in SEEN} == {("tensor",)}


@pytest.mark.slow
def test_a_jitted_layer_is_traced_for_each_step():
    """JAX keeps the traces of `jax.jit`: one of a step without the rule must not serve a step that has it."""
    jitted = jax.jit(block)
    model = replace(NAMED, block=jitted)
    for rules, dims in (({}, ()), (MLP, ("tensor",)), ({}, ())):
        SEEN.clear()
        first_step(make({"tensor": 4}, {**PARAMETERS, **rules}, model))
        assert {split_dims(each)[2] for each in SEEN} == {dims}


def test_under_a_pipeline():
    rules = {"head/out": [None, "tensor"], **MLP}
    step = make({"pipe": {"size": 3, "microbatches": 4}, "tensor": 2}, rules)
    text = step.lower(toy.abstract(toy.batch(0))).as_text()
    assert '[{}, {}, {"tensor"}]' in "".join(line for line in text.splitlines() if "sharding_constraint" in line)


def test_an_axis_that_only_activations_name_is_in_use():
    layouts = toy.plan({"data": 2, "tensor": 2}, NAMED, rules=MLP)
    assert layouts.table.row("head/out").layout.used_axes == ()


OURS = {
    "transformer": (
        transformer(TransformerConfig(layers=2, width=16, heads=2, mlp_width=32, vocabulary=32, length=8)),
        {
            "embed/output": ["data", "tensor", None],
            "blocks/(attention|mlp)/output": [None, "tensor", None],
            "head/output": [None, None, "tensor"],
        },
    ),
    "mlp": (mlp(MLPConfig(features=8, classes=4, widths=(16,))), {"layers/[01]/output": ["data", "tensor"]}),
}


@pytest.mark.parametrize(("model", "rules"), OURS.values(), ids=OURS)
def test_reference_models_name_activations(model, rules):
    step = make({"data": 2, "tensor": {"size": 2, "explicit": False}}, rules, model)
    images = {"inputs": np.ones((8, 8), np.float32), "targets": np.ones(8, np.int32)}
    inputs = toy.batch(0) if model.name == "transformer" else images
    batch = {"weights": np.ones(inputs["targets"].shape, np.float32), **inputs}
    lines = step.lower(toy.abstract(batch)).as_text().splitlines()
    assert sum("sharding_constraint" in line for line in lines) >= 2 * len(rules)  # forward and backward


UNMET = {
    "typo": (
        {**MLP, "blocks/mpl/output": [None, None, None]},
        r"Rule 'blocks/mpl/output' matches no activation that the model names: .*blocks/mlp/output",
    ),
    "rank": (
        {"blocks/mlp/output": [None, "tensor"]},
        r"Activation 'blocks/mlp/output' of shape \(8, 8, 64\) .on each device. has 3 dims, but rule "
        r"'blocks/mlp/output' gives the layout \(None, tensor\) with 2 entries. Give one entry per dim",
    ),
    "ambiguous": (
        {".*mlp/output": [None, None, None], "blocks/.*/output": [None, None, None]},
        "is matched by 2 rules, '.*mlp/output' and 'blocks/.*/output'. Make the rules more specific",
    ),
}


@pytest.mark.parametrize(("rules", "message"), UNMET.values(), ids=UNMET)
@pytest.mark.parametrize("model", [NAMED, PLAIN], ids=["blocks", "plain"])
def test_rejects_rules_that_do_not_fit_the_model(rules, message, model):
    step = make({"data": 2, "tensor": 2}, {**PARAMETERS, **rules}, model)
    with pytest.raises(LayoutError, match=message):
        step.lower(toy.abstract(toy.batch(0)))


def test_rejects_indivisible_dims():
    rules = {"head/out": [None, "tensor"], "blocks/mlp/output": [None, "tensor", None]}
    step = make({"tensor": 4}, rules)
    batch = {name: rows[:, :6] if rows.ndim > 1 else rows for name, rows in toy.batch(0).items()}
    wanted = r"dim 1 of size 6 does not divide over tensor .size 4.: 6 % 4 = 2.*write null for this dim in the rule"
    with pytest.raises(LayoutError, match=wanted):
        step.lower(toy.abstract(batch))


@pytest.mark.slow
def test_explains_names_for_models_without_any():
    for rules in ({**PARAMETERS, **MLP}, keras()):
        strategy = rules if isinstance(rules, ModelParallel) else {"data": 2, "tensor": 2}
        step = make(strategy, None if strategy is rules else rules, toy.BLOCK_MODEL)
        with pytest.raises(LayoutError, match=r'names none.*y = spmdkit.name_output\(y, "a_name/output"\)'):
            step(step.init(0), toy.batch(0))


ROWS = r"the rows of the batch, which are split over \[data, fsdp\]. Begin dim 0 with \[data, fsdp\], or write"
MANUAL = {
    "twice": ({"tensor": 4}, ["tensor", None, "tensor"], "'tensor' twice. An axis can split one dim only"),
    "rows elsewhere": ({"data": 4}, [None, None, "data"], "'data' splits the rows.*cannot split dim 2 too"),
    "some of the rows": ({"data": 2, "fsdp": {"size": 2, "floor_bytes": 0}}, ["data", None, None], ROWS),
    "rows after": (
        {"data": 2, "tensor": 2},
        [["tensor", "data"], None, None],
        "which are split over data. Begin dim 0 with",
    ),
    "stages": ({"pipe": {"size": 3}}, [None, "pipe", None], "the step itself splits its work over 'pipe'.*Leave pipe"),
}


@pytest.mark.parametrize(("strategy", "axes", "message"), MANUAL.values(), ids=MANUAL)
def test_rejects_manual_axes_in_rules(strategy, axes, message):
    rules = {"blocks/mlp/output": axes, **(PARAMETERS if "tensor" in strategy else {})}
    with pytest.raises(LayoutError, match=message):
        make(strategy, rules)


@pytest.mark.slow_cases("axes0", "axes2")
@pytest.mark.parametrize("axes", [["data", None, None], [["data", "tensor"], None, None], []])
def test_the_axes_of_the_rows_may_be_named(axes, expected):
    found = first_step(make({"data": 2, "tensor": 2}, {**PARAMETERS, "blocks/mlp/output": axes}))
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, found, expected))) < 1e-5
    assert {split_dims(each)[0] for each in SEEN} == {("tensor",) if axes and "tensor" in axes[0] else ()}


def test_rejects_tensor_in_rules_for_split_models():
    model = replace(NAMED, parallelize=lambda parallel: NAMED)
    with pytest.raises(LayoutError, match=r"over 'tensor', so its activations.*strategy.tensor.explicit=false"):
        make({"tensor": 4}, {"blocks/mlp/output": [None, None, "tensor"]}, model)


def test_output_rules_can_match_parameters():
    def init(key):
        return {"layer": {"output": jax.random.normal(key, (8, 8))}}

    model = Model(init=init, loss=lambda p, b, key: ((b["inputs"] @ p["layer"]["output"]).sum(), 1.0))
    step = make({"tensor": 4}, {"layer/output": ["tensor", None]}, model)
    step.lower({"inputs": jax.ShapeDtypeStruct((4, 8), jnp.float32)})


@pytest.mark.parametrize("path", ["blocks/mlp", "output", "/output", 3])
def test_names_end_in_output(path):
    with pytest.raises(UserError, match="the name of an activation ends in /output"):
        name_output(jnp.ones(3), path)
