"""T5X's rules over `params_axes`."""

from types import SimpleNamespace

import jax
import pytest
from jax.sharding import PartitionSpec
from spmdkit.layouts import from_t5x_rules, resolve
from spmdkit.mesh import DeviceMesh

import spmdkit

STANDARD = [
    ("batch", "data"),
    ("vocab", "model"),
    ("embed", None),
    ("mlp", "model"),
    ("heads", "model"),
    ("kv", None),
    ("joined_kv", "model"),
]
"""As T5X has them for parameters that are split over `model` alone."""
AXES = {
    "decoder": {
        "layers_0": {
            "mlp": {"wi_0": {"kernel_axes": SimpleNamespace(names=PartitionSpec("embed", "mlp"))}},
            "self_attention": {"query": {"kernel_axes": SimpleNamespace(names=("embed", "joined_kv"))}},
            "scale_axes": ("embed",),
        }
    },
    "token_embedder": {"embedding_axes": SimpleNamespace(names=("vocab", "embed"))},
}


def test_a_tree_is_laid_out_at_the_paths_of_its_parameters():
    mesh = DeviceMesh.of(data=2, tensor=4)
    layers = {
        "mlp": {"wi_0": {"kernel": (8, 32)}},
        "self_attention": {"query": {"kernel": (8, 8)}},
        "scale": (8,),
    }
    shapes = {"decoder": {"layers_0": layers}, "token_embedder": {"embedding": (64, 8)}}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"), shapes, is_leaf=lambda x: type(x) is tuple
    )
    table = resolve(params, mesh, rules=from_t5x_rules(STANDARD, AXES, mesh, axes={"model": "tensor"}))
    assert {row.path: row.layout.axes for row in table.rows} == {
        "decoder/layers_0/mlp/wi_0/kernel": (None, "tensor"),
        "decoder/layers_0/scale": (None,),
        "decoder/layers_0/self_attention/query/kernel": (None, "tensor"),
        "token_embedder/embedding": ("tensor", None),
    }


def test_a_misspelt_rule_is_told():
    with pytest.raises(spmdkit.UserError, match="from_t5x_rules: no rule is for the logical axis 'joined_kv'"):
        from_t5x_rules([("joind_kv", "tensor")], AXES, DeviceMesh.of(tensor=8))
