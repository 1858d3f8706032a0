"""How a module is told whether it is trained: by whichever argument it has."""

import os
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from spmdkit.models.adapters.adapted import Rows, drop, mode_arguments
from spmdkit.models.adapters.keras import _moments, _on_mesh
from spmdkit.models.adapters.library_model import adapt
from spmdkit.models.adapters.linen import adapt_linen
from spmdkit.parallel.sharding.batch_rows import uses_batch_axes
from support import toy


def test_arguments_that_say_opposite_things():
    def call(x, training=False, deterministic=True, use_running_average=None, rate=0.5):
        return x

    assert mode_arguments(call, True) == {"training": True, "deterministic": False, "use_running_average": False}
    assert mode_arguments(call, False) == {"training": False, "deterministic": True, "use_running_average": True}
    assert mode_arguments(lambda x: x, True) == {}
    assert mode_arguments(print, True) == {}
    assert mode_arguments(dict.fromkeys, True) == {}, "a function without a signature"


KEY, EXAMPLE = jax.random.key(3), jnp.arange(6, dtype=jnp.int32)
ONES = jnp.ones((6, 4, 50))


@pytest.mark.slow
def test_a_row_keeps_its_mask_on_another_device():
    whole = drop(ONES, 0.5, KEY, EXAMPLE)
    part = drop(ONES[2:5], 0.5, KEY, EXAMPLE[2:5])
    np.testing.assert_array_equal(whole[2:5], part)
    np.testing.assert_array_equal(drop(ONES, 0.5, KEY, EXAMPLE[::-1]), whole[::-1])


def test_every_row_and_every_key_has_a_mask_of_its_own():
    rows = {np.asarray(row).tobytes() for key in (KEY, jax.random.key(4)) for row in drop(ONES, 0.5, key, EXAMPLE)}
    assert len(rows) == 12


def test_what_is_kept_is_scaled():
    """A quarter is dropped, and the mean stays: 1200 values deviate by 0.017."""
    dropped = np.asarray(drop(ONES, 0.25, KEY, EXAMPLE))
    assert set(np.unique(dropped).tolist()) == {0.0, np.float32(1 / 0.75)}
    assert abs((dropped == 0).mean() - 0.25) < 0.05
    np.testing.assert_array_equal(drop(ONES, 0.0, KEY, EXAMPLE), ONES)
    assert not drop(ONES, 1.0, KEY, EXAMPLE).any()


@pytest.mark.parametrize("dims", [(1,), (-2,)])
def test_dims_that_share_a_mask(dims):
    shared = np.asarray(drop(ONES, 0.5, KEY, EXAMPLE, dims))
    np.testing.assert_array_equal(shared, np.broadcast_to(shared[:, :1], shared.shape))
    assert len({row.tobytes() for row in shared[:, 0]}) == 6, "rows do not share it"


def test_rows_that_share_a_mask():
    shared = np.asarray(drop(ONES, 0.5, KEY, EXAMPLE, (0,)))
    assert shared.any()
    assert not shared.all()


@pytest.mark.slow
def test_rows_and_a_further_dim_that_were_made_one():
    """Each row has 3 parts, one behind the other, with masks of their own."""
    folded = np.asarray(drop(jnp.ones((18, 50)), 0.5, KEY, EXAMPLE))
    np.testing.assert_array_equal(folded[3:6], drop(jnp.ones((3, 50)), 0.5, KEY, EXAMPLE[1:2]))
    assert len({row.tobytes() for row in folded}) == 18
    with pytest.raises(ValueError, match=r"shape \(16, 50\) for 6 rows: dim 0 must be a multiple"):
        drop(jnp.ones((16, 50)), 0.5, KEY, EXAMPLE)


def test_layers_of_keras_are_restored_after_a_call():
    kinds = {"BatchNormalization": type("Norm", (), {}), "Dropout": type("Dropout", (), {"rate": 0.5})}
    keras, layers = SimpleNamespace(layers=SimpleNamespace(**kinds)), [kind() for kind in kinds.values()]
    rows, module = Rows(key=KEY, example=EXAMPLE, axes=("data",)), SimpleNamespace(_flatten_layers=lambda: layers)
    with _on_mesh(keras, module, rows):
        assert all(map(vars, layers)), "both work on the whole batch"
    assert not any(map(vars, layers))


def test_batch_norm_of_keras_has_the_moments_of_all_rows():
    """Rows of two devices, with other means: their own variances are smaller."""
    values = np.random.default_rng(0).normal(size=(8, 2, 3)).astype(np.float32) + np.arange(8)[:, None, None]
    find = partial(_moments, SimpleNamespace(_reduction_axes=[0, 1]), ("data",), mask=None)
    mapped = jax.shard_map(
        find, mesh=toy.mesh(data=2).backend_mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
    )
    mean, variance = jax.jit(mapped)(values)
    np.testing.assert_allclose(mean, values.mean(axis=(0, 1)), rtol=1e-5)
    np.testing.assert_allclose(variance, values.var(axis=(0, 1)), rtol=1e-5)


def test_dropout_of_linen_shares_its_mask_along_its_broadcast_dims():
    from flax import linen as nn

    dropout = nn.Dropout(0.5, broadcast_dims=(1,), deterministic=False)
    call = adapt_linen(dropout, ONES[0]).call
    dropped = np.asarray(call({}, None, ONES, Rows(key=KEY, example=EXAMPLE, axes=()))[0])
    np.testing.assert_array_equal(dropped, np.broadcast_to(dropped[:, :1], ONES.shape))
    assert set(np.unique(dropped).tolist()) == {0.0, 2.0}


def two_dropouts(library):
    """A module that multiplies two dropouts of ones: a value is kept if both masks keep it."""
    if library == "linen":
        from flax import linen as nn

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x, deterministic: bool):
                ones = 1.0 + 0.0 * nn.Dense(64)(x)
                first, second = (nn.Dropout(0.5, deterministic=deterministic) for _ in range(2))
                return first(ones) * second(ones)

        return Net()
    if library == "nnx":
        from flax import nnx as flax_nnx

        class Net(flax_nnx.Module):
            def __init__(self, rngs):
                self.linear = flax_nnx.Linear(4, 64, rngs=rngs)
                self.first, self.second = flax_nnx.Dropout(0.5, rngs=rngs), flax_nnx.Dropout(0.5)

            def __call__(self, x, deterministic: bool, rngs: flax_nnx.Rngs):
                ones = 1.0 + 0.0 * self.linear(x)
                return self.first(ones) * self.second(ones, deterministic=deterministic, rngs=rngs)

        return Net
    os.environ.setdefault("KERAS_BACKEND", "jax")
    from keras import Model, layers, ops

    x = layers.Input((4,))
    ones = ops.ones_like(layers.Dense(64)(x))
    return Model(x, layers.Dropout(0.5)(ones) * layers.Dropout(0.5)(ones))


@pytest.mark.slow_cases("linen")
@pytest.mark.parametrize("library", ["linen", "nnx", pytest.param("keras", marks=pytest.mark.slow)])
def test_two_dropout_layers_draw_different_masks(library):
    """Two independent masks keep a quarter of 1024 values (deviation 0.014); one shared mask would keep half."""
    batch = {
        "inputs": np.ones((16, 4), np.float32),
        "targets": np.zeros(16, np.float32),
        "example": np.arange(16, dtype=np.int32),
    }
    with jax.numpy_rank_promotion("allow"):
        model = adapt(two_dropouts(library), loss=lambda outputs, _: (outputs > 0).mean(-1), example=batch)
        given = model.init(jax.random.key(0)), {**batch, "weights": np.ones(16, np.float32)}, jax.random.key(1)
        sums = model.loss(*given)
        assert not uses_batch_axes(model.loss, *given), "no layer combines rows"
    assert 0.18 < float(sums[0]) / 16 < 0.32
