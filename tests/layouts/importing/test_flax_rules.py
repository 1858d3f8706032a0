"""Flax's logical axes: priority, an axis once in an array, metadata of all kinds, and what is told."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from spmdkit.layouts import ModelParallel, from_flax_rules
from spmdkit.mesh import DeviceMesh

import spmdkit

RULES = [("batch", "data"), ("vocab", "model"), ("mlp", "model"), ("embed", "data"), ("embed", "model"), ("norm", None)]


def axes_of(rules, path):
    return rules[path].axes


@pytest.mark.parametrize(
    ("names", "axes"),
    [
        (("embed", "mlp"), ("data", "model")),
        (("mlp", "embed"), ("model", "data")),
        (("batch", "embed"), ("data", "model")),  # the axis of the first rule is taken: the next one
        (("batch", "embed", "mlp"), ("data", None, "model")),  # both are taken
        (("vocab", "mlp"), ("model", None)),
        ((None, "mlp"), (None, "model")),
        (("norm",), (None,)),
        (("unheard of", "mlp"), (None, "model")),  # no rule reaches it
        ((), ()),
    ],
)
def test_rules_in_order_and_an_axis_once(mesh, names, axes):
    assert axes_of(from_flax_rules(RULES, {"array": names}, mesh), "array") == axes


def test_the_example_of_the_documentation():
    mesh = DeviceMesh((2, 2, 2), ("X", "Y", "Z"))
    rules = (("batch", "X"), ("features", "X"), ("heads", "Y"), ("batch", "Z"))
    found = from_flax_rules(rules, {"x": ("batch", "length", "heads", "features")}, mesh)
    assert axes_of(found, "x") == ("X", None, "Y", None)


def test_none_keeps_a_dim_whole_whatever_follows(mesh):
    rules = [("embed", None), ("embed", "model")]
    assert axes_of(from_flax_rules(rules, {"x": ("embed",)}, mesh), "x") == (None,)


def test_several_mesh_axes_of_one_dim(mesh):
    rules = [("embed", ("data", "model")), ("mlp", "model")]
    assert axes_of(from_flax_rules(rules, {"x": ("mlp", "embed")}, mesh), "x") == (None, ("data", "model"))


@pytest.mark.parametrize(
    "leaf",
    [
        PartitionSpec("embed", "mlp"),
        SimpleNamespace(value=None, names=("embed", "mlp")),
        SimpleNamespace(sharding_names=("embed", "mlp")),
        SimpleNamespace(names=None, sharding=PartitionSpec("embed", "mlp")),
    ],
)
def test_metadata(mesh, leaf):
    rules = from_flax_rules(RULES, {"layers_0": {"kernel": leaf, "other": None}}, mesh)
    assert list(rules) == ["layers_0/kernel"]
    assert axes_of(rules, "layers_0/kernel") == ("data", "model")


def test_axes_of_the_mesh_have_other_names():
    mesh = DeviceMesh.of(fsdp=2, tensor=4)
    names = {"kernel": ("embed", "mlp"), "a.b": ("embed",)}
    rules = from_flax_rules(RULES, names, mesh, axes={"data": "fsdp", "model": "tensor"})
    assert axes_of(rules, "kernel") == ("fsdp", "tensor")
    assert axes_of(rules, "a.b") == ("fsdp",)
    assert rules["axb"] is None  # a path is no expression
    rules = from_flax_rules(RULES, names, mesh, axes={"data": None, "model": "tensor"})
    assert axes_of(rules, "kernel") == (None, "tensor")


@pytest.mark.parametrize(
    ("rules", "names", "message"),
    [
        ([("embed",)], {}, r"rule 0 is \('embed',\); each rule is a pair"),
        (["embed"], {}, "rule 0 is 'embed'"),
        (7, {}, "got rules 7"),
        ([("embed", 3)], {"x": ("embed",)}, "an entry is None, the name of a mesh axis"),
        ([("embed", "modle")], {"x": ("embed",)}, r"axes=\{'modle': 'model'\}"),
        (RULES, {"x": ("mlp", "mlp")}, "'x' has dims .* two of them 'mlp'"),
        (RULES, {"a": {"x": 3.0}}, r"'a/x' in the tree of names is 3.0 \(float\)"),
        ([("embedding", "model")], {"x": ("embeding",)}, r"add the rule \('embeding', None\)"),
        ([("embed", PartitionSpec.UNCONSTRAINED)], {"x": ("embed",)}, "leaves a dim to the compiler"),
    ],
)
def test_mistakes(mesh, rules, names, message):
    with pytest.raises(spmdkit.UserError, match=message):
        from_flax_rules(rules, names, mesh)


def test_surplus_axes_are_ignored_and_named():
    """The rules of MaxText name mesh axes that a mesh here does not have."""
    mesh = DeviceMesh.of(fsdp=2, tensor=4)
    rules = [
        ["mlp", ["fsdp_transpose", "tensor", "tensor_sequence"]],
        ["embed", ["tensor_transpose"]],  # nothing is left of it: the next rule decides
        ["embed", ["fsdp", "sequence"]],
        ["q_lora", ["autoregressive"]],  # no array has this name: not reported
    ]
    with pytest.warns(UserWarning, match="ignored mesh axes") as warned:
        found = from_flax_rules(rules, {"kernel": ("embed", "mlp")}, mesh)
    assert axes_of(found, "kernel") == ("fsdp", "tensor")
    (message,) = (str(warning.message) for warning in warned)
    assert "does not have: fsdp_transpose, tensor_sequence, tensor_transpose, sequence. The mesh has pipe" in message
    assert "axes={'fsdp_transpose': 'tensor'}" in message


def test_an_axis_renamed_to_a_missing_one_is_an_error(mesh):
    with pytest.raises(spmdkit.UserError, match="over the mesh axis 'nowhere'; the mesh has data, model"):
        from_flax_rules(RULES, {"x": ("mlp",)}, mesh, axes={"model": "nowhere"})


def test_an_axis_renamed_for_nothing(mesh):
    with pytest.raises(spmdkit.UserError, match="axes renames 'modell'"):
        from_flax_rules(RULES, {"x": ("mlp",)}, mesh, axes={"modell": "model"})


def test_a_model_trains_in_the_layout(mesh):
    """The tree as Flax has it, under XLA's own split: one step equals one device."""
    names = {"dense": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}, "out": {"kernel": ("mlp", "embed")}}
    random = np.random.default_rng(0)
    shapes = {"dense": {"kernel": (8, 16), "bias": (16,)}, "out": {"kernel": (16, 8)}}
    first = jax.tree.map(lambda shape: random.normal(size=shape), shapes, is_leaf=lambda each: isinstance(each, tuple))

    def loss(params, batch, key):
        hidden = jnp.tanh(batch["inputs"] @ params["dense"]["kernel"] + params["dense"]["bias"][None])
        return ((hidden @ params["out"]["kernel"] - batch["inputs"]) ** 2).sum(), jnp.float32(len(hidden))

    model = spmdkit.Model(init=lambda key: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), first), loss=loss)
    rules = from_flax_rules([("mlp", "model")], names, mesh)
    layouts = spmdkit.lay_out(model, ModelParallel(layout_map=rules, batch_dim_name="data"))
    assert {row.path: row.layout.axes for row in layouts.table.rows} == {
        "dense/bias": ("model",),
        "dense/kernel": (None, "model"),
        "out/kernel": ("model", None),
    }
    step = spmdkit.build_step(model, optax.sgd(0.1), layouts)
    batch = {"inputs": random.normal(size=(8, 8)).astype(np.float32)}
    given = {name: jax.device_put(value, layouts.batch_sharding()) for name, value in batch.items()}
    state, _ = step(step.init(0), given)
    wanted = jax.grad(lambda params: loss(params, batch, None)[0] / 8)(first)
    expected = jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, first, wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.params, expected)
