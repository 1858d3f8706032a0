"""Plans of `transformers`, over its own names in torch's orientation and in Flax's."""

import jax
import pytest
from spmdkit.layouts import from_tp_plan, resolve
from spmdkit.mesh import DeviceMesh

import spmdkit

LLAMA = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "layers.*.input_layernorm": "sequence_parallel",
    "embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_rep",
}


def tree(matrix, out_in):
    """Two layers in the names of `transformers`; (out, in) is turned round for `kernel`."""

    def shape(out, into):
        return (out, into) if out_in else (into, out)

    layer = {
        "self_attn": {
            "q_proj": {matrix: shape(32, 16), "bias": (32,)},
            "o_proj": {matrix: shape(16, 32), "bias": (16,)},
        },
        "mlp": {"up_proj": {matrix: shape(64, 16)}, "down_proj": {matrix: shape(16, 64)}},
        "input_layernorm": {"weight": (16,)},
    }
    shapes = {
        "model": {
            "embed_tokens": {"weight": (128, 16)},
            "layers": {"0": layer, "11": layer},
            "norm": {"weight": (16,)},
        },
        "lm_head": {matrix: shape(128, 16)},
    }
    return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each, "float32"), shapes, is_leaf=lambda x: type(x) is tuple)


@pytest.fixture
def own():
    return DeviceMesh.of(fsdp=2, tensor=4)


@pytest.mark.parametrize("matrix", ["weight", "kernel"])
def test_a_tree_is_laid_out(own, matrix):
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


def test_a_module_and_its_parameters_in_one_plan(own):
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
    with pytest.raises(spmdkit.UserError, match=r"'layers.\*.mlp.up_proj' of the plan names no parameter.*'ignore'"):
        from_tp_plan(plan, params, own)


def test_plans_with_the_prefix_and_flat_names(own):
    params = {"layers.3.mlp.experts.down_proj": jax.ShapeDtypeStruct((8, 16, 64), "float32")}
    plan = {"model.layers.*.mlp.experts.down_proj": "rowwise"}
    assert from_tp_plan(plan, params, own)["layers.3.mlp.experts.down_proj"].axes == (None, None, "tensor")
    plan = {"layers.*.mlp.experts.down_proj": "grouped_gemm"}
    found = from_tp_plan(plan, params, own, axis="fsdp")
    assert found["layers.3.mlp.experts.down_proj"].axes == ("fsdp", None, None)


def test_the_name_of_a_parameter_goes_before_that_of_its_module(own):
    shape = jax.ShapeDtypeStruct((8, 8), "float32")
    params = {"a": {"weight": shape, "table": shape}}
    rules = from_tp_plan({"a": "colwise", "a.table": "rowwise"}, params, own)
    assert rules["a/weight"].axes == ("tensor", None)
    assert rules["a/table"].axes == (None, "tensor")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"lm_head": "colwize"}, "'lm_head' is 'colwize', which is no word for a split. Did you mean colwise"),
        ({"lm_head": "packed_colwise"}, "several matrices lie in one array"),
        (
            {"layers.*.mlp.gate_proj": "colwise"},
            r"'layers.\*.mlp.gate_proj' of the plan names no parameter. The nearest",
        ),
        ({"layers.mlp.up_proj": "colwise"}, "names no parameter"),
    ],
)
def test_mistakes(own, plan, message):
    with pytest.raises(spmdkit.UserError, match=message):
        from_tp_plan(plan, tree("weight", True), own)


def test_a_mesh_without_the_axis(mesh):
    with pytest.raises(spmdkit.UserError, match="over the mesh axis 'tensor'; the mesh has data, model"):
        from_tp_plan(LLAMA, tree("weight", True), mesh)
