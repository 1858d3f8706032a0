"""Rules of Flax, Keras and Hugging Face as a LayoutMap."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from spmdkit.layouts import from_flax_rules, from_keras, from_tp_plan, resolve
from spmdkit.mesh import DeviceMesh

import spmdkit

FLAX_RULES = [("batch", "data"), ("vocab", "model"), ("mlp", "model"), ("embed", "data"), ("embed", "model")]
FLAX_RULES += [("norm", None)]


@pytest.mark.parametrize(
    ("rules", "names", "axes"),
    [
        (FLAX_RULES, ("embed", "mlp"), ("data", "model")),
        (FLAX_RULES, ("mlp", "embed"), ("model", "data")),
        (FLAX_RULES, ("batch", "embed"), ("data", "model")),  # the axis of the first rule is taken: the next one
        (FLAX_RULES, ("batch", "embed", "mlp"), ("data", None, "model")),  # both are taken
        (FLAX_RULES, ("vocab", "mlp"), ("model", None)),
        (FLAX_RULES, (None, "mlp"), (None, "model")),
        (FLAX_RULES, ("norm",), (None,)),
        (FLAX_RULES, ("unheard of", "mlp"), (None, "model")),  # no rule reaches it
        (FLAX_RULES, (), ()),
        ([("embed", None), ("embed", "model")], ("embed",), (None,)),  # None is a decision
        ([("embed", ("data", "model")), ("mlp", "model")], ("mlp", "embed"), (None, ("data", "model"))),
        (  # the example in the documentation of Flax
            (("batch", "data"), ("features", "data"), ("heads", "model"), ("batch", "model")),
            ("batch", "length", "heads", "features"),
            ("data", None, "model", None),
        ),
    ],
)
def test_applies_rules_in_order_and_each_axis_once(mesh, rules, names, axes):
    assert from_flax_rules(rules, {"array": names}, mesh)["array"].axes == axes


@pytest.mark.parametrize(
    "leaf",
    [
        PartitionSpec("embed", "mlp"),
        SimpleNamespace(value=None, names=("embed", "mlp")),
        SimpleNamespace(sharding_names=("embed", "mlp")),
        SimpleNamespace(names=None, sharding=PartitionSpec("embed", "mlp")),
    ],
)
def test_reads_flax_metadata(mesh, leaf):
    rules = from_flax_rules(FLAX_RULES, {"layers_0": {"kernel": leaf, "other": None}}, mesh)
    assert list(rules) == ["layers_0/kernel"]
    assert rules["layers_0/kernel"].axes == ("data", "model")


def test_renames_axes():
    mesh = DeviceMesh.of(fsdp=2, tensor=4)
    names = {"kernel": ("embed", "mlp"), "a.b": ("embed",)}
    rules = from_flax_rules(FLAX_RULES, names, mesh, axes={"data": "fsdp", "model": "tensor"})
    assert rules["kernel"].axes == ("fsdp", "tensor")
    assert rules["a.b"].axes == ("fsdp",)
    assert rules["axb"] is None  # a path is no expression
    rules = from_flax_rules(FLAX_RULES, names, mesh, axes={"data": None, "model": "tensor"})
    assert rules["kernel"].axes == (None, "tensor")


@pytest.mark.parametrize(
    ("rules", "names", "axes", "message"),
    [
        ([("embed",)], {}, None, r"a rule must be a pair .* got \('embed',\)"),
        ([("embed", 3)], {"x": ("embed",)}, None, "rule 'embed': Invalid entry 3"),
        (FLAX_RULES, {"x": ("mlp", "mlp")}, None, "'x' has dims .* two of them 'mlp'"),
        (FLAX_RULES, {"a": {"x": 3.0}}, None, r"'a/x' in the tree of names must be .* got 3.0 \(float\)"),
        ([("embed", PartitionSpec.UNCONSTRAINED)], {"x": ("embed",)}, None, "Each entry is None"),
        (FLAX_RULES, {"x": ("mlp",)}, {"model": "nowhere"}, "unknown mesh axis 'nowhere' .* the mesh has data, model"),
        (FLAX_RULES, {"x": ("mlp",)}, {"modell": "model"}, "axes renames 'modell'"),
    ],
)
def test_rejects_invalid_flax_rules(mesh, rules, names, axes, message):
    with pytest.raises(spmdkit.UserError, match=message):
        from_flax_rules(rules, names, mesh, axes=axes)


def test_ignores_unknown_axes_with_a_warning():
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
    assert found["kernel"].axes == ("fsdp", "tensor")
    (message,) = (str(warning.message) for warning in warned)
    assert "does not have: fsdp_transpose, tensor_sequence, tensor_transpose, sequence. The mesh has pipe" in message
    assert "axes={'fsdp_transpose': 'tensor'}" in message


class KerasMap:
    """What Keras's has: items(), and a mesh of devices by name."""

    def __init__(self, rules, mesh):
        self.rules, self.device_mesh = rules, mesh

    def items(self):
        return self.rules.items()


def layout(*axes):
    return SimpleNamespace(axes=axes, device_mesh=None)


KERAS_MESH = SimpleNamespace(
    shape=(4, 2), axis_names=["batch", "model"], devices=np.array([f"cpu:{n}" for n in range(8)]).reshape(4, 2)
)
KERAS_RULES = {
    ".*dense.*kernel": layout(None, "model"),
    ".*dense.*bias": layout("model"),
    "sequential/dense_1/kernel": layout("batch", "model"),
    ".*dense/output": layout("batch", None),
}


def test_keeps_keys_layouts_and_mesh_of_keras():
    rules = from_keras(KerasMap(KERAS_RULES, KERAS_MESH))
    assert list(rules) == list(KERAS_RULES)
    assert rules.device_mesh == DeviceMesh((4, 2), ("batch", "model"))
    assert rules["sequential/dense/kernel"].axes == (None, "model")
    assert rules["sequential/dense_1/kernel"].axes == ("batch", "model")  # the path itself wins
    assert rules["sequential/dense/bias"].shard_shape((16,)) == (8,)
    assert rules["conv/kernel"] is None


def test_converts_other_maps(mesh):
    other = DeviceMesh.of(data=2, tensor=4)
    rules = from_keras(KerasMap(KERAS_RULES, KERAS_MESH), other, axes={"batch": "data", "model": "tensor"})
    assert rules["a/dense/kernel"].axes == (None, "tensor")
    assert rules["a/dense/output"].axes == ("data", None)
    rules = from_keras(KerasMap({"dense": layout("model")}, KERAS_MESH), match="search")  # of Keras before 3.14
    assert rules["sequential/dense/bias"].axes == ("model",)
    own = spmdkit.LayoutMap(mesh)
    own["a"] = ("model",)
    assert dict(from_keras(own).items()) == dict(own.items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("a", ("model",))], r"takes a keras.distribution.LayoutMap, got .*\(list\)"),
        (KerasMap({"(": layout("model")}, KERAS_MESH), "not a valid regular expression"),
        (KerasMap({"a": layout("modle")}, KERAS_MESH), r"unknown mesh axis 'modle' .*axes=\{'modle': 'model'\}"),
    ],
)
def test_rejects_invalid_keras_maps(given, message):
    with pytest.raises(spmdkit.UserError, match=message):
        from_keras(given)


LLAMA = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}
LLAMA |= {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
LLAMA |= {"layers.*.input_layernorm": "sequence_parallel", "embed_tokens": "embedding_rowwise"}
LLAMA |= {"lm_head": "colwise_rep"}


def tree(matrix, out_in):
    """Two layers in the names of `transformers`; a matrix (out, in) is transposed if it is named `kernel`."""

    def shape(out, into):
        return (out, into) if out_in else (into, out)

    attention = {"q_proj": {matrix: shape(32, 16), "bias": (32,)}, "o_proj": {matrix: shape(16, 32), "bias": (16,)}}
    mlp = {"up_proj": {matrix: shape(64, 16)}, "down_proj": {matrix: shape(16, 64)}}
    layer = {"self_attn": attention, "mlp": mlp, "input_layernorm": {"weight": (16,)}}
    model = {"embed_tokens": {"weight": (128, 16)}, "layers": {"0": layer, "11": layer}, "norm": {"weight": (16,)}}
    shapes = {"model": model, "lm_head": {matrix: shape(128, 16)}}
    return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each, "float32"), shapes, is_leaf=lambda x: type(x) is tuple)


@pytest.fixture
def own():
    return DeviceMesh.of(fsdp=2, tensor=4)


@pytest.mark.parametrize("matrix", ["weight", "kernel"])
def test_converts_the_plan_of_llama(own, matrix):
    params = tree(matrix, matrix == "weight")
    table = resolve(params, own, rules=from_tp_plan(LLAMA, params, own))
    found = {row.path: row.layout.axes for row in table.rows}
    out, into = (("tensor", None), (None, "tensor")) if matrix == "weight" else ((None, "tensor"), ("tensor", None))
    for number in (0, 11):
        layer = f"model/layers/{number}"
        assert found[f"{layer}/self_attn/q_proj/{matrix}"] == found[f"{layer}/mlp/up_proj/{matrix}"] == out
        assert found[f"{layer}/self_attn/o_proj/{matrix}"] == found[f"{layer}/mlp/down_proj/{matrix}"] == into
        assert found[f"{layer}/self_attn/q_proj/bias"] == ("tensor",)
        assert found[f"{layer}/self_attn/o_proj/bias"] == (None,)
        assert found[f"{layer}/input_layernorm/weight"] == (None,)
    assert found["model/embed_tokens/weight"] == ("tensor", None)
    assert found[f"lm_head/{matrix}"] == out
    assert "model/norm/weight" not in from_tp_plan(LLAMA, params, own)  # not in the plan: the strategy's


def test_converts_plans_of_modules_and_parameters(own):
    """As mixtures of experts have it: the hook on the module decides nothing where every parameter has its own word."""
    shapes = {"router.weight": (8, 16), "experts.down_proj": (8, 16, 64), "experts.up_proj": (8, 64, 16)}
    params = {f"layers.0.mlp.{name}": jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    plan = {"layers.*.mlp": "gather", "layers.*.mlp.experts": "moe_tp_experts"}
    plan |= {"layers.*.mlp.experts.down_proj": "rowwise", "layers.*.mlp.experts.up_proj": "colwise"}
    rules = from_tp_plan(plan, params, own)
    assert rules["layers.0.mlp.experts.down_proj"].axes == (None, None, "tensor")
    assert rules["layers.0.mlp.experts.up_proj"].axes == (None, "tensor", None)
    assert rules["layers.0.mlp.router.weight"] is None
    plan |= {"layers.*.mlp.up_proj": "colwise"}  # of layers without experts
    assert len(from_tp_plan(plan, params, own, unused="ignore")) == 2
    with pytest.raises(spmdkit.UserError, match=r"'layers.\*.mlp.up_proj' in the plan matches no parameter.*'ignore'"):
        from_tp_plan(plan, params, own)


def test_converts_prefixes_and_flat_names(own):
    name, key = "layers.3.mlp.experts.down_proj", "layers.*.mlp.experts.down_proj"
    params = {name: jax.ShapeDtypeStruct((8, 16, 64), "float32")}
    assert from_tp_plan({f"model.{key}": "rowwise"}, params, own)[name].axes == (None, None, "tensor")
    assert from_tp_plan({key: "grouped_gemm"}, params, own, axis="fsdp")[name].axes == ("fsdp", None, None)


def test_parameters_take_precedence_over_modules(own):
    shape = jax.ShapeDtypeStruct((8, 8), "float32")
    params = {"a": {"weight": shape, "table": shape}}
    rules = from_tp_plan({"a": "colwise", "a.table": "rowwise"}, params, own)
    assert rules["a/weight"].axes == ("tensor", None)
    assert rules["a/table"].axes == (None, "tensor")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"lm_head": "colwize"}, "'lm_head': unknown style 'colwize'. Did you mean colwise"),
        ({"lm_head": "packed_colwise"}, "several matrices in one array"),
        ({"layers.*.mlp.gate": "colwise"}, r"'layers.\*.mlp.gate' in the plan matches no parameter. The nearest"),
        ({"layers.mlp.up_proj": "colwise"}, "matches no parameter"),
        ({"layers.*.up_proj": "colwise"}, "matches no parameter"),
    ],
)
def test_rejects_invalid_plans(own, mesh, plan, message):
    with pytest.raises(spmdkit.UserError, match=message):
        from_tp_plan(plan, tree("weight", True), own)
    with pytest.raises(spmdkit.UserError, match=r"unknown mesh axis 'tensor' .*; the mesh has data, model"):
        from_tp_plan(LLAMA, tree("weight", True), mesh)
