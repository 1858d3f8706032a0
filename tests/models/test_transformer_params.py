"""The first parameters: those of the plain one, the same bits in any layout, their scales."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_transformers import SMALL, VARIANTS, first_params
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.models.transformer_params import init


@pytest.mark.parametrize("name", ["grouped", "tied", "qwen", "gpt"])
def test_first_parameters_are_those_of_the_plain_one(name):
    config = replace(VARIANTS[name], layers=3)
    expected = reference.transformer.init(config, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, first_params(config), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "fsdp"), [(1, 8), (4, 2)])
def test_first_parameters_are_the_same_bits_in_any_layout(data, fsdp):
    config = TransformerConfig(vocabulary=256, length=8, layers=4, width=48, heads=4)
    model, key = transformer(config), jax.random.key(3)
    mesh = jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def sharding(leaf):
        """Splits the last dim that divides."""
        last = max((dim for dim, size in enumerate(leaf.shape) if size % fsdp == 0), default=None)
        return NamedSharding(mesh, PartitionSpec(*("fsdp" if dim == last else None for dim in range(leaf.ndim))))

    shardings = jax.tree.map(sharding, jax.eval_shape(model.init, key))
    one, split = jax.jit(model.init)(key), jax.jit(model.init, out_shardings=shardings)(key)
    assert split["blocks"]["mlp"]["gate"].sharding.shard_shape((4, 48, 128)) == (4, 48, 128 // fsdp)
    jax.tree.map(np.testing.assert_array_equal, one, split)


@pytest.mark.slow
def test_scales_of_first_parameters():
    config = TransformerConfig(vocabulary=512, length=8, layers=2, width=128, heads=4)
    params = first_params(config)
    stds = {
        ("embed", "tokens"): 1.0,
        ("blocks", "attention", "query"): 128**-0.5,
        ("blocks", "attention", "out"): (128 * 4) ** -0.5,
        ("blocks", "mlp", "down"): (384 * 4) ** -0.5,
        ("head", "logits"): 128**-0.5,
    }
    for path, std in stds.items():
        leaf = params
        for name in path:
            leaf = leaf[name]
        np.testing.assert_allclose(np.std(leaf), std, rtol=0.02)
    np.testing.assert_allclose(
        np.std(first_params(replace(config, tied=True))["embed"]["tokens"]), 128**-0.5, rtol=0.02
    )
    assert (params["head"]["norm"] == 1).all()
    assert (params["blocks"]["mlp"]["norm"] == 1).all()


@pytest.mark.slow
def test_a_block_does_not_depend_on_how_many_there_are():
    few, many = (first_params(replace(SMALL, layers=n))["blocks"]["mlp"] for n in (2, 3))
    np.testing.assert_array_equal(few["gate"], many["gate"][:2])
    np.testing.assert_allclose(few["down"] * 4**0.5, many["down"][:2] * 6**0.5, rtol=1e-6)
    assert (few["gate"][0] != few["gate"][1]).any()


def test_init_is_exported_as_a_plain_function():
    assert jax.eval_shape(lambda key: init(SMALL, key), jax.random.key(0))["embed"]["tokens"].shape == (23, 16)
