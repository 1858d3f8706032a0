import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_optimizations import one_update, quadratic, stacked_params, train
from spmdkit.training.optimizing.directions import DIRECTIONS
from spmdkit.training.optimizing.optimizer_config import READS, OptimizerConfig
from spmdkit.training.optimizing.optimizers import make_optimizer

NAMES = ("sgd", "adam", "adamw", "lion", "adafactor", "muon")
RATES = {"sgd": 0.3, "adam": 0.1, "adamw": 0.1, "lion": 0.1, "adafactor": 0.3, "muon": 0.3}


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_minimises_a_quadratic(name):
    params, goal = stacked_params(), stacked_params(seed=1)
    config = OptimizerConfig(name=name, learning_rate=RATES[name], schedule={"name": "linear"})
    trained = train(config, params, goal, 100)
    assert quadratic(trained, goal) < 0.02 * quadratic(params, goal)


def test_the_names_are_these():
    assert tuple(DIRECTIONS) == tuple(READS) == NAMES


def test_muon_makes_each_matrix_orthogonal():
    params, gradients = stacked_params(), stacked_params(seed=1)
    gradients["blocks"]["kernel"] = gradients["blocks"]["kernel"].at[0].multiply(1000.0)
    update = one_update(OptimizerConfig(name="muon", learning_rate=1.0), params, gradients)["blocks"]["kernel"]
    for layer in range(2):
        singular_values = np.linalg.svd(np.asarray(update[layer]), compute_uv=False)
        np.testing.assert_allclose(singular_values / (0.2 * 8**0.5), 1.0, atol=0.35)
        np.testing.assert_allclose(np.sqrt(np.mean(update[layer] ** 2)), 0.2 * 0.5**0.5 * 2**0.5, rtol=0.35)


def test_muon_leaves_the_rest_to_adam():
    params, gradients = stacked_params(), stacked_params(seed=1)
    muon, adam = (one_update(OptimizerConfig(name=name), params, gradients) for name in ("muon", "adam"))
    for group, name in (("embed", "tokens"), ("blocks", "norm"), ("head", "logits")):
        np.testing.assert_allclose(muon[group][name], adam[group][name], rtol=1e-6)
    everything = one_update(OptimizerConfig(name="muon", muon_skip=()), params, gradients)
    assert (jnp.abs(everything["head"]["logits"] - adam["head"]["logits"]) > 1e-5).any()


@pytest.mark.parametrize(
    ("name", "given"),
    [("muon", {"momentum": 0.95}), ("lion", {"betas": (0.9, 0.99)}), ("adamw", {"betas": (0.9, 0.999)})],
)
def test_rates_that_are_not_given_are_these(name, given):
    params = stacked_params()

    def third_update(**options):
        optimizer = make_optimizer(OptimizerConfig(name=name, **options), 10, params)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for seed in range(3):
            updates, state = update(stacked_params(seed), state, params)
        return jax.device_get((updates, state))

    jax.tree.map(np.testing.assert_array_equal, third_update(), third_update(**given))


def test_muon_of_an_older_optax(monkeypatch):
    monkeypatch.delattr(optax.contrib, "muon")
    with pytest.raises(ValueError, match=r"optimizer.name=muon needs optax 0.2.7; this is optax \d"):
        make_optimizer(OptimizerConfig(name="muon"), 10, stacked_params())


@pytest.mark.parametrize(("name", "shape", "rounding"), [("adafactor", (128, 130), 1e-6), ("muon", (2, 2), 1e-4)])
def test_what_looks_across_a_matrix_never_looks_across_blocks(name, shape, rounding):
    """Three updates of a stack are those of each of its blocks alone, however much louder and larger another is.

    The first update of adafactor hardly depends on a gradient's scale: what it compares with comes later, and only dims
    of 128 and more are factored. For muon there are more blocks than rows and columns: they set no scale.
    """
    random, sizes = np.random.default_rng(0), np.array([1.0, 100.0, 0.01])

    def draw(*shape):
        return {
            "blocks": {
                "kernel": random.normal(size=(3, *shape)) * sizes[:, None, None],
                "norm": random.normal(size=(3, 4)),
            }
        }

    def numbers(tree, block=slice(None)):
        whole = {"embed": {"tokens": np.ones((6, 4))}, "head": {"logits": np.ones((4, 6))}, **tree}
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf, jnp.float32),
            {**whole, "blocks": jax.tree.map(lambda leaf: leaf[block], tree["blocks"])},
        )

    params, rounds = draw(*shape), [draw(*shape) for _ in range(3)]
    for number, each in enumerate(rounds):
        each["blocks"]["kernel"][0] *= 10.0**number  # one block grows louder than it was

    def updates(block):
        own = numbers(params, block)
        optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=1.0), 10, own)
        state, update, found = optimizer.init(own), jax.jit(optimizer.update), []
        for gradients in rounds:
            change, state = update(numbers(gradients, block), state, own)
            found.append(change["blocks"])
        return found

    together = updates(slice(None))
    for block in range(3):
        alone = updates(slice(block, block + 1))
        for mine, whole in zip(alone, together, strict=True):
            jax.tree.map(
                lambda a, b, block=block: np.testing.assert_allclose(a[0], b[block], rtol=2e-4, atol=rounding),
                mine,
                whole,
            )
