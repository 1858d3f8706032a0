"""Tests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from spmdkit.models.generation import _continue, generate
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel.model import Model

V = 7


def counting(params, batch):
    """Always predicts the token after the one it sees."""
    return 50.0 * jax.nn.one_hot((batch["inputs"] + 1) % V, V) * params["scale"]


def oldest(params, batch):
    """Predicts the first token of the window."""
    return 50.0 * jax.nn.one_hot(jnp.broadcast_to(batch["inputs"][:, :1], batch["inputs"].shape), V)


def model_of(predict):
    return Model(init=lambda key: {"scale": jnp.ones(())}, loss=lambda *_: (0, 0), predict=predict, name="toy")


PARAMS = {"scale": np.ones((), np.float32)}


def test_continues_a_prompt_and_sees_its_last_window():
    assert generate(model_of(counting), PARAMS, [4], length=5, window=8) == [4, 5, 6, 0, 1, 2]
    assert generate(model_of(counting), PARAMS, [], length=5, window=8) == [1, 2, 3, 4, 5], "the same as after a zero"
    assert generate(model_of(counting), PARAMS, [0], length=20, window=3) == [n % V for n in range(21)]
    assert generate(model_of(oldest), PARAMS, [1, 2], length=6, window=3) == [1, 2, 1, 1, 2, 1, 1, 2]
    assert generate(model_of(oldest), PARAMS, [1, 2, 3, 4, 5], length=1, window=3) == [1, 2, 3, 4, 5, 3]


@pytest.mark.slow
def test_text_stands_for_its_bytes():
    model = model_of(lambda params, batch: jax.nn.one_hot(batch["inputs"], 256) * 50)
    assert bytes(generate(model, PARAMS, "é!", length=2, window=8)).decode() == "é!!!"
    assert generate(model, PARAMS, b"a", length=1, window=8) == [97, 97]


def test_temperature():
    even = model_of(lambda params, batch: jnp.broadcast_to(jnp.arange(V) * 0.1, (1, batch["inputs"].shape[1], V)))
    assert generate(even, PARAMS, [0], length=30, window=4, temperature=0)[1:] == [V - 1] * 30
    drawn = generate(even, PARAMS, [0], length=300, window=4, temperature=1.0)[1:]
    assert drawn == generate(even, PARAMS, [0], length=300, window=4, temperature=1.0)[1:]
    assert drawn != generate(even, PARAMS, [0], length=300, window=4, temperature=1.0, seed=1)[1:]


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_a_temperature_divides_the_logits(temperature):
    """Under 1 the likely become likelier, over 1 all become alike."""
    logits = jnp.arange(V) * 0.5
    fixed = model_of(lambda params, batch: jnp.broadcast_to(logits, (1, batch["inputs"].shape[1], V)))
    drawn = generate(fixed, PARAMS, [0], length=2000, window=2, temperature=temperature)[1:]
    expected = jax.nn.softmax(logits / temperature)
    np.testing.assert_allclose(np.bincount(drawn, minlength=V) / 2000, expected, atol=0.04)


def test_one_compilation_for_any_prompt():
    model = model_of(counting)
    generate(model, PARAMS, [0], length=3, window=5)
    compiled = _continue._cache_size()
    for prompt, temperature, seed in (([1, 2], 0.5, 3), ([1] * 9, 0.0, 2**31), ([], 2.0, 0)):
        generate(model, PARAMS, prompt, length=3, window=5, temperature=temperature, seed=seed)
    assert _continue._cache_size() == compiled


@pytest.mark.slow
def test_parameters_on_a_mesh_give_the_same_text():
    model = transformer(TransformerConfig(vocabulary=32, length=12, layers=2, width=16, heads=2))
    whole = jax.jit(model.init)(jax.random.key(0))
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    split = jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 1), "fsdp")), whole)
    expected = generate(model, whole, [1, 2], length=16, window=12)
    assert generate(model, jax.device_put(whole, split), [1, 2], length=16, window=12) == expected


@pytest.mark.parametrize(
    ("predict", "options", "message"),
    [
        (None, {}, "The model toy does not define `predict`, so it cannot continue a prompt. Give it one, `pre"),
        (counting, {"prompt": [3, V, -1]}, rf"tokens \[7, -1\], but the model's vocabulary is 0 to {V - 1}"),
        (counting, {"length": 0, "window": 0}, "length=0 and window=0 must be at least 1"),
        (counting, {"temperature": float("nan")}, "temperature=nan at least 0"),
        (counting, {"seed": 2**32}, r"seed=4294967296 must be from 0 to 2\*\*32 - 1"),
        (counting, {"prompt": "\udcff"}, r"The prompt '\\udcff' is not valid UTF-8"),
        (counting, {"temperature": -1.0}, "temperature=-1.0 at least 0"),
        (lambda params, batch: batch["inputs"] * 1.0, {}, r"shape \(1, 4\) for 4 tokens.*\(1, 4, vocabulary\)"),
    ],
)
def test_rejects_invalid_arguments(predict, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model_of(predict), PARAMS, **{"prompt": [0], "length": 1, "window": 4, **options})
