import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.models.mlp import MLPConfig, mlp
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.training.optimizing.parameter_kinds import by_layer, check_met, is_stacked, select


def shapes_of(model):
    return jax.eval_shape(model.init, jax.random.key(0))


TRANSFORMER = shapes_of(transformer(TransformerConfig(vocabulary=16, length=8, layers=2, width=8, heads=2)))
MLP = shapes_of(mlp(MLPConfig(features=4, classes=2, widths=(3,))))


def picked(params, **options):
    return {path for path, chosen in leaves_with_paths(select(params, is_stacked(params), **options)) if chosen}


def test_matrices_of_the_transformer():
    assert picked(TRANSFORMER) == {
        "embed/tokens",
        "blocks/attention/query",
        "blocks/attention/key",
        "blocks/attention/value",
        "blocks/attention/out",
        "blocks/mlp/gate",
        "blocks/mlp/up",
        "blocks/mlp/down",
        "head/logits",
    }


def test_matrices_of_the_mlp():
    assert picked(MLP) == {"layers/0/kernel", "layers/1/kernel"}


def test_skipped_paths():
    assert picked(MLP, skip=("layers/0/.*",)) == {"layers/1/kernel"}
    assert picked(MLP, skip=("layers",)) == picked(MLP)


def test_a_pattern_that_meets_nothing():
    with pytest.raises(
        ValueError, match=r"decay_skip: 'layers/0/kernels' matches no parameter. Did you mean layers/0/ker"
    ):
        check_met(MLP, ("layers/0/kernels",), "optimizer.decay_skip")
    assert picked(MLP, skip=("embed/.*",)) == picked(MLP)


def test_only_a_block_model_is_stacked():
    assert is_stacked(TRANSFORMER)
    assert not is_stacked(MLP)
    assert not is_stacked({"embed": 0, "blocks": 0, "head": 0, "more": 0})
    assert not is_stacked([1, 2])
    unstacked = {"blocks": [{"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}]}
    assert picked(unstacked) == {"blocks/0/kernel"}


def test_each_block_is_clipped_by_itself():
    clip = optax.clip_by_block_rms(1.0)
    params = {"embed": jnp.ones(3), "blocks": jnp.ones((2, 3)), "head": jnp.ones(1)}
    gradients = {"embed": jnp.full(3, 4.0), "blocks": jnp.array([[10.0] * 3, [0.5] * 3]), "head": jnp.ones(1)}
    optimizer = by_layer(clip, params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(updates["blocks"], [[1.0] * 3, [0.5] * 3], rtol=1e-6)
    np.testing.assert_allclose(updates["embed"], 1.0, rtol=1e-6)


def test_state_of_each_block():
    state = by_layer(optax.scale_by_adam(), TRANSFORMER).init(jax.tree.map(lambda x: jnp.zeros(x.shape), TRANSFORMER))
    counts = {path: leaf.shape for path, leaf in leaves_with_paths(state) if path.endswith("count")}
    assert sorted(counts.values()) == [(), (2,)]
    moments = [leaf.shape for path, leaf in leaves_with_paths(state) if path.endswith("mu/blocks/mlp/norm")]
    assert moments == [(2, 8)]
