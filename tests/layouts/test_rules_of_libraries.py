"""Imported rules, compared with the libraries that they come from."""

import random

import pytest
from spmdkit.layouts import from_flax_rules, from_tp_plan
from spmdkit.layouts.imported_rules import TP_STYLES
from spmdkit.mesh import DeviceMesh

import spmdkit

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]
AXES = ("data", "fsdp", "tensor")
MISSING = "no torch or transformers: `make test-libraries` installs them"


def test_assigns_axes_as_flax_does():
    """Random rules over random names."""
    from flax import linen

    mesh, draw = DeviceMesh.of(data=2, fsdp=2, tensor=2), random.Random(0)
    names = [f"{letter}{number}" * 4 for letter in "xyz" for number in range(3)]
    for _ in range(200):
        rules = [(draw.choice(names), draw.choice([None, *AXES, draw.sample(AXES, 2)])) for _ in range(8)]
        rules = [(name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in rules]
        dims = [draw.choice([None, each]) for each in draw.sample(names, draw.randint(0, 4))]
        ruled = rules + [(name, None) for name in names]  # no name is without a rule, which could be a misspelt one
        expected = linen.logical_to_mesh_axes(tuple(dims), ruled)
        assert from_flax_rules(ruled, {"a": tuple(dims)}, mesh)["a"].axes == tuple(expected)


def test_knows_or_rejects_every_style_of_transformers():
    transformers = pytest.importorskip("transformers", reason=MISSING)
    plans = [getattr(config, "base_model_tp_plan", None) for config in transformers.CONFIG_MAPPING.values()]
    words = {word for plan in plans for word in (plan or {}).values()}
    assert len(words) > 5
    assert {word for word in words if word not in TP_STYLES and "packed" not in word} == set()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mixtral"])
def test_converts_the_plans_of_transformers(name):
    """Every matrix of its blocks; what is packed is left out, as the message says."""
    torch, transformers = (pytest.importorskip(name, reason=MISSING) for name in ("torch", "transformers"))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.AutoConfig.for_model(name, **sizes, **heads)
    with torch.device("meta"):
        params = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters())
    mesh, plan = DeviceMesh.of(fsdp=2, tensor=4), config.base_model_tp_plan
    if name == "mixtral":
        with pytest.raises(spmdkit.UserError, match="'packed_colwise': several matrices in one array"):
            from_tp_plan(plan, params, mesh)
        plan = {key: word for key, word in plan.items() if "packed" not in word}
    rules = from_tp_plan(plan, params, mesh)
    split = {path: layout.axes for path in params if (layout := rules[path]) is not None}
    assert split["model.layers.1.self_attn.q_proj.weight"] == ("tensor", None)
    assert split["model.layers.1.self_attn.o_proj.weight"] == (None, "tensor")
    for path, axes in split.items():
        assert rules[path].shard_shape(tuple(params[path].shape))[axes.index("tensor") if "tensor" in axes else 0]
    assert "model.embed_tokens.weight" not in split
