"""Forms that the libraries' documentation uses: keys given to a call, lists of layers and functions, two inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.models.adapters.library_model import adapt
from spmdkit.parallel import verify
from support import toy

pytestmark = [
    pytest.mark.usefixtures("broadcasting", "float64"),
    pytest.mark.slow_except(
        "test_several_names_are_several_arguments",
        "test_equinox_drops_nothing_in_a_prediction",
        "test_statistics_of_nnx_follow_the_batch",
    ),
]
ROWS, FEATURES, CLASSES = 8, 4, 4


def batch(seed=0):
    rows = toy.labelled(np.random.default_rng(seed), ROWS, FEATURES, classes=CLASSES)
    return {**rows, "example": rows["example"] + seed * ROWS}


def proved(module, **options):
    """Verifies a module over 2 devices with 2 microbatches; returns what was proved."""
    model = adapt(module, **{"loss": "softmax_cross_entropy", "example": batch()} | options)
    options = {"accumulate": 2, "optimizer": toy.SGD, "devices": toy.devices(2)}
    result = verify(model, {"data": 2}, [batch(seed) for seed in range(2)], **options)
    assert result.ok, str(result)
    return result.proved


def log_loss(log_probabilities, rows):
    return -jnp.take_along_axis(log_probabilities, rows["targets"][:, None], axis=1)[:, 0]


def test_nnx_with_keys_given_to_the_call_and_its_own():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.first = nnx.Linear(FEATURES, 8, rngs=rngs)
            self.norm, self.held = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.25, rngs=rngs)
            self.dropout = nnx.Dropout(rate=0.25)
            self.second = nnx.Linear(8, CLASSES, rngs=rngs)

        def __call__(self, x, rngs: nnx.Rngs | None = None):
            return self.second(self.dropout(self.held(self.norm(self.first(x))), rngs=rngs))

    assert "random numbers" in proved(Net)


def test_equinox_with_a_list_of_layers_and_functions():
    import equinox as eqx

    class Net(eqx.Module):
        layers: list

        def __init__(self, key):
            first, second = jax.random.split(key)
            linear = (eqx.nn.Linear(FEATURES, 8, key=first), eqx.nn.Linear(8, CLASSES, key=second))
            self.layers = [linear[0], jax.nn.relu, jnp.ravel, linear[1], jax.nn.log_softmax]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    proved(Net, loss=log_loss)
    model = adapt(Net(jax.random.key(1)), loss=log_loss, example=batch())
    assert set(model.init(jax.random.key(0))["layers"]) == {"0", "3"}


def test_linen_whose_norm_always_trains():
    """Its statistics are those of the batch in an evaluation too: then rows depend on each other there."""
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(CLASSES)(nn.BatchNorm(use_running_average=False)(x))

    model = adapt(Net(), loss="softmax_cross_entropy", example=batch())
    params, state = model.init(jax.random.key(0)), model.init_state(jax.random.key(0))
    total, weight, _, after = model.loss(params, batch(), None, state)
    assert np.isfinite(float(total))
    assert float(weight) == ROWS
    assert jax.tree.all(jax.tree.map(jnp.array_equal, after, state))  # an evaluation changes nothing


@pytest.mark.long
def test_keras_with_two_inputs_and_probabilities(keras_float64):
    keras = keras_float64
    left, right = keras.Input((2,)), keras.Input((2,))
    both = keras.layers.Concatenate()([keras.layers.Dense(4, activation="relu")(left), right])
    net = keras.Model([left, right], keras.layers.Dense(CLASSES, activation="softmax")(both))

    def crossed(probabilities, rows):
        return log_loss(jnp.log(probabilities), rows)

    proved(net, loss=crossed, inputs=lambda rows: [rows["inputs"][:, :2], rows["inputs"][:, 2:]])
    example = batch() | {"left": batch()["inputs"][:, :2], "right": batch()["inputs"][:, 2:]}
    outputs = [
        adapt(net, loss=crossed, example=example, inputs=inputs)
        for inputs in (
            ("left", "right"),
            lambda rows: (rows["left"], rows["right"]),
            lambda rows: [rows["left"], rows["right"]],
        )
    ]
    found = [model.predict(model.init(jax.random.key(0)), example) for model in outputs]
    assert jnp.array_equal(found[0], found[2])
    assert jnp.array_equal(found[1], found[2])


def test_linen_with_annotated_axes_and_recomputed_layers():
    """Parameters are plain arrays, without the boxes that name their axes; losses of positions."""
    from flax import linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            x = x + nn.MultiHeadDotProductAttention(2, deterministic=True)(nn.LayerNorm()(x), mask=mask)
            return x + nn.Dense(8, kernel_init=kernel)(nn.gelu(x))

    class Language(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(CLASSES, 8)
            x = embed(tokens) + self.param("positions", nn.initializers.normal(0.1), (FEATURES, 8))
            return embed.attend(nn.remat(Layer)()(x, nn.make_causal_mask(tokens)))

    def rows(seed=0):
        tokens = np.random.default_rng(seed).integers(0, CLASSES, (2, ROWS, FEATURES)).astype(np.int32)
        return batch(seed) | {"inputs": tokens[0], "targets": tokens[1]}

    model = adapt(Language(), loss="softmax_cross_entropy", example=rows())
    kernel = jax.eval_shape(model.init, jax.random.key(0))["CheckpointLayer_0"]["Dense_0"]["kernel"]
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    result = verify(model, {"data": 2}, [rows(seed) for seed in range(2)], optimizer=toy.SGD, devices=toy.devices(2))
    assert result.ok, str(result)


@pytest.mark.filterwarnings("ignore:The model does not pass JAX's checks")
def test_equinox_with_a_flag_and_a_key():
    import equinox as eqx

    class Net(eqx.Module):
        first: eqx.nn.Linear
        scale: jax.Array
        size: int
        dropout: eqx.nn.Dropout
        head: eqx.nn.Sequential

        def __init__(self, key, size=8):
            first, second = jax.random.split(key)
            self.first, self.scale, self.size = eqx.nn.Linear(FEATURES, size, key=first), jnp.ones(size), size
            self.dropout = eqx.nn.Dropout(0.25)
            self.head = eqx.nn.Sequential([eqx.nn.LayerNorm(size), eqx.nn.Linear(size, CLASSES, key=second)])

        def __call__(self, x, enable_dropout, key):
            x, _ = jax.lax.scan(lambda sums, part: (sums + part, None), jnp.zeros(self.size), self.first(x)[None])
            return self.head(self.dropout(self.scale * x, inference=not enable_dropout, key=key))

    assert "random numbers" in proved(Net)


def test_keras_model_that_is_not_built(keras_float64):
    keras = keras_float64

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(8, activation="relu"), keras.layers.Dense(CLASSES)
            self.dropout = keras.layers.Dropout(0.25)

        def call(self, inputs, training=False):
            return self.second(self.dropout(self.first(inputs), training=training))

    assert "random numbers" in proved(Net())


def test_equinox_drops_nothing_in_a_prediction():
    import equinox as eqx

    class Net(eqx.Module):
        scale: jax.Array
        dropout: eqx.nn.Dropout

        def __call__(self, x, key):
            return self.dropout(self.scale * x, key=key)

    model = adapt(Net(jnp.ones(()), eqx.nn.Dropout(0.5)), loss="squared_error", example=batch(), inputs="inputs")
    outputs = model.predict(model.init(jax.random.key(0)), batch())
    np.testing.assert_array_equal(outputs, batch()["inputs"])


def test_statistics_of_nnx_follow_the_batch():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.norm = nnx.BatchNorm(FEATURES, momentum=0.75, rngs=rngs)

        def __call__(self, x):
            return self.norm(x)

    model, key = adapt(Net, loss="softmax_cross_entropy", example=batch()), jax.random.key(0)
    rows = batch() | {"inputs": batch()["inputs"].astype(np.float32)}
    state = model.loss(model.init(key), rows, key, model.init_state(key)).state
    np.testing.assert_allclose(state["norm"]["mean"], rows["inputs"].mean(axis=0) / 4, rtol=1e-5)


def test_several_names_are_several_arguments():
    """Of a module that is called with both, in their order."""
    import equinox as eqx

    class Net(eqx.Module):
        scale: jax.Array

        def __call__(self, left, right):
            return self.scale * (left - 2 * right)

    example = batch() | {"left": np.arange(ROWS, dtype=float), "right": np.ones(ROWS)}
    model = adapt(Net(jnp.ones(())), loss="squared_error", example=example, inputs=["left", "right"])
    outputs = model.predict(model.init(jax.random.key(0)), example)
    np.testing.assert_array_equal(outputs, np.arange(ROWS) - 2)


def test_noise_of_each_row():
    """A variational autoencoder: called with two arguments, of which one is a key for each row; several outputs."""
    from flax import linen as nn

    class VAE(nn.Module):
        @nn.compact
        def __call__(self, x, z_keys):
            mean, scale = nn.Dense(2)(x), jnp.exp(nn.Dense(2)(x))
            noise = jax.vmap(lambda key: jax.random.normal(key, (2,)))(z_keys)
            return nn.Dense(FEATURES)(mean + scale * noise), mean, scale

    def elbo(outputs, rows):
        found, mean, scale = outputs
        divergence = (mean**2 + scale**2 - 1 - 2 * jnp.log(scale)).sum(1) / 2
        return ((found - rows["inputs"]) ** 2).sum(1) + divergence

    assert "random numbers" in proved(VAE(), loss=elbo, inputs=lambda rows, keys: (rows["inputs"], keys))
