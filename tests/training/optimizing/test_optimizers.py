from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.models.mlp import MLPConfig, mlp
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.training.optimizing.learning_rates import make_learning_rate
from spmdkit.training.optimizing.optimizer_config import OptimizerConfig
from spmdkit.training.optimizing.optimizers import DIRECTIONS, is_stacked, make_optimizer, select
from support.training import one_update, quadratic, stacked_params, train


@pytest.mark.slow_cases("config2-expected2")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OptimizerConfig(name="sgd", learning_rate=0.1), optax.sgd(0.1)),
        (OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
        (OptimizerConfig(name="adam", learning_rate=0.1), optax.adam(0.1)),
        (OptimizerConfig(name="adamw", learning_rate=0.1, betas=(0.8, 0.9)), optax.adam(0.1, 0.8, 0.9)),
        (OptimizerConfig(name="adamw", epsilon=0.1), optax.adam(1e-3, eps=0.1)),
        (OptimizerConfig(name="lion", learning_rate=0.1), optax.lion(0.1, weight_decay=0.0)),
    ],
)
def test_gives_the_updates_of_optax(config, expected):
    params = stacked_params()
    mine, theirs = make_optimizer(config, 10, params), expected
    states = mine.init(params), theirs.init(params)
    for seed in range(3):
        gradients = stacked_params(seed)
        (updates, state), (reference, other) = (
            optimizer.update(gradients, state, params) for optimizer, state in zip((mine, theirs), states, strict=True)
        )
        states = state, other
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), updates, reference)


@pytest.mark.slow_cases("adafactor")
@pytest.mark.parametrize("name", [name for name in DIRECTIONS if name != "adam"])
def test_decays_matrices_but_not_norms(name):
    """With gradients of zero the only update is -rate * decay * parameter, exactly."""
    params = stacked_params()
    config = OptimizerConfig(name=name, learning_rate=0.5, weight_decay=0.2)
    updates = one_update(config, params, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_array_equal(updates["blocks"]["norm"], 0)
    for path, update in leaves_with_paths(updates):
        if path != "blocks/norm":
            np.testing.assert_allclose(update, -0.1 * dict(leaves_with_paths(params))[path], rtol=1e-6)


def test_schedule_scales_every_update():
    params, gradients = stacked_params(), stacked_params(seed=1)
    config = OptimizerConfig(name="sgd", learning_rate=0.5, schedule={"name": "linear", "final_ratio": 0.2})
    optimizer, rates = make_optimizer(config, 5, params), make_learning_rate(config.learning_rate, config.schedule, 5)
    state = optimizer.init(params)
    for number in range(5):
        updates, state = optimizer.update(gradients, state, params)
        rate = float(rates(number))
        expected = jax.tree.map(lambda leaf, rate=rate: -rate * leaf, gradients)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)
    assert float(rates(0)) == 0.5 > float(rates(4)) > 0.1


def test_decay_skip_excludes_matrices():
    params = stacked_params()
    config = OptimizerConfig(name="sgd", learning_rate=1.0, weight_decay=0.1, decay_skip=("embed/.*",))
    updates = one_update(config, params, jax.tree.map(jnp.zeros_like, params))
    assert [path for path, leaf in leaves_with_paths(updates) if leaf.any()] == ["blocks/kernel", "head/logits"]
    two = {"head": jnp.ones((2, 2)), "heads": jnp.ones((2, 2))}
    updates = one_update(replace(config, decay_skip=("head",)), two, jax.tree.map(jnp.zeros_like, two))
    assert (updates["head"].any(), updates["heads"].any()) == (False, True), "the whole path"
    with pytest.raises(ValueError, match=r"optimizer.decay_skip: 'embde/.*' matches no parameter. Did you mean emb"):
        make_optimizer(OptimizerConfig(decay_skip=("embde/.*",)), 10, params)


def test_stacked_can_be_set():
    params = {"blocks": {"norm": jnp.ones((2, 3))}}
    config = OptimizerConfig(name="sgd", weight_decay=0.1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for stacked, decayed in ((None, True), (True, False)):
        optimizer = make_optimizer(config, 10, params, stacked=stacked)
        assert optimizer.update(zeros, optimizer.init(params), params)[0]["blocks"]["norm"].any() == decayed


def test_decay_can_be_turned_on_in_a_resumed_run():
    """The state has the same leaves with and without decay."""
    params = stacked_params()
    states = [make_optimizer(OptimizerConfig(weight_decay=decay), 10, params).init(params) for decay in (0.0, 0.1)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


# The user's own


def test_uses_an_own_optimizer(user_module):
    def make(learning_rate, scale, num_steps):
        assert num_steps == 10
        return optax.chain(optax.scale(scale), optax.scale_by_learning_rate(learning_rate))

    user_module(make=make)
    config = OptimizerConfig(name="mine:make", learning_rate=0.5, options={"scale": 3.0})
    params = stacked_params()
    np.testing.assert_allclose(one_update(config, params, params)["head"]["logits"], -1.5 * params["head"]["logits"])


def test_uses_optax_by_name():
    config = OptimizerConfig(name="optax:adabelief", learning_rate=0.1, options={"b1": 0.8})
    params, goal = stacked_params(), stacked_params(seed=1)
    assert quadratic(train(config, params, goal, 60), goal) < 0.1 * quadratic(params, goal)


def test_rejects_invalid_own_optimizers(user_module):
    user_module(make=lambda: 3, value=3)
    with pytest.raises(ValueError, match=r"optimizer.name='mine:make': the result must be an optax.Grad"):
        make_optimizer(OptimizerConfig(name="mine:make"), 10, {})
    with pytest.raises(ValueError, match=r"optimizer.name='mine:value' is a int, not a function"):
        make_optimizer(OptimizerConfig(name="mine:value"), 10, {})
    with pytest.raises(ValueError, match=r"b3 is not an option of adabelief. The options are learning_rate, b1"):
        make_optimizer(OptimizerConfig(name="optax:adabelief", options={"b3": 1}), 10, {})


@pytest.mark.slow_cases("adafactor")
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_minimizes_a_quadratic(name):
    params, goal = stacked_params(), stacked_params(seed=1)
    config = OptimizerConfig(name=name, learning_rate=0.3, schedule={"name": "linear"})
    trained = train(config, params, goal, 100)
    assert quadratic(trained, goal) < 0.02 * quadratic(params, goal)


def test_muon_has_momentum_by_default():
    params = stacked_params()

    def third_update(**options):
        optimizer = make_optimizer(OptimizerConfig(name="muon", **options), 10, params)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for seed in range(3):
            updates, state = update(stacked_params(seed), state, params)
        return jax.device_get(updates)

    by_default, none = third_update(), third_update(momentum=0.0)
    jax.tree.map(np.testing.assert_array_equal, by_default, third_update(momentum=0.95))
    assert any(map(np.any, jax.tree.leaves(jax.tree.map(np.subtract, by_default, none))))


@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2, 1)], ids=["wide", "tall"])
def test_muon_orthogonalizes_each_matrix(axes):
    params, gradients = stacked_params(), stacked_params(seed=1)
    for tree in (params, gradients):
        tree["blocks"]["kernel"] = tree["blocks"]["kernel"].transpose(axes)
    gradients["blocks"]["kernel"] = gradients["blocks"]["kernel"].at[0].multiply(1000.0)
    update = one_update(OptimizerConfig(name="muon", learning_rate=1.0), params, gradients)["blocks"]["kernel"]
    for layer in range(2):
        singular_values = np.linalg.svd(np.asarray(update[layer]), compute_uv=False)
        np.testing.assert_allclose(singular_values / (0.2 * 8**0.5), 1.0, atol=0.35)
        np.testing.assert_allclose(np.sqrt(np.mean(update[layer] ** 2)), 0.2 * 0.5**0.5 * 2**0.5, rtol=0.35)


@pytest.mark.slow
def test_muon_uses_adam_for_the_rest():
    params, gradients = stacked_params(), stacked_params(seed=1)
    muon, adam = (one_update(OptimizerConfig(name=name), params, gradients) for name in ("muon", "adam"))
    for group, name in (("embed", "tokens"), ("blocks", "norm"), ("head", "logits")):
        np.testing.assert_allclose(muon[group][name], adam[group][name], rtol=1e-6)
    everything = one_update(OptimizerConfig(name="muon", muon_skip=()), params, gradients)
    assert (jnp.abs(everything["head"]["logits"] - adam["head"]["logits"]) > 1e-5).any()


@pytest.mark.slow_cases("adafactor-shape0-1e-06", "muon-shape1-0.0001")
@pytest.mark.parametrize(("name", "shape", "rounding"), [("adafactor", (128, 130), 1e-6), ("muon", (2, 2), 1e-4)])
def test_treats_blocks_separately(name, shape, rounding):
    """Three updates of a stack are those of each of its blocks alone, however much louder and larger another is.

    The first update of adafactor hardly depends on a gradient's scale: what it compares with comes later, and only dims
    of 128 and more are factored. For muon there are more blocks than rows and columns: they set no scale.
    """
    random, sizes = np.random.default_rng(0), np.array([1.0, 100.0, 0.01])

    def draw(loudness=1.0):
        kernel = random.normal(size=(3, *shape)) * sizes[:, None, None] * np.array([loudness, 1, 1])[:, None, None]
        blocks = {"kernel": kernel, "norm": random.normal(size=(3, 4))}
        whole = {"embed": {"tokens": np.ones((6, 4))}, "blocks": blocks, "head": {"logits": np.ones((4, 6))}}
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), whole)

    params, rounds = draw(), [draw(10.0**number) for number in range(3)]  # one block grows louder than it was

    def updates(block):
        def of_block(tree):
            return {**tree, "blocks": jax.tree.map(lambda leaf: leaf[block], tree["blocks"])}

        own = of_block(params)
        optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=1.0), 10, own)
        state, update, found = optimizer.init(own), jax.jit(optimizer.update), []
        for gradients in rounds:
            change, state = update(of_block(gradients), state, own)
            found.append(change["blocks"])
        return found

    together = updates(slice(None))
    for block in range(3):
        expected = [jax.tree.map(lambda leaf, block=block: leaf[block : block + 1], each) for each in together]
        for mine, whole in zip(updates(slice(block, block + 1)), expected, strict=True):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=rounding), mine, whole)


def shapes_of(model):
    return jax.eval_shape(model.init, jax.random.key(0))


TRANSFORMER = shapes_of(transformer(TransformerConfig(vocabulary=16, length=8, layers=2, width=8, heads=2)))
MLP = shapes_of(mlp(MLPConfig(features=4, classes=2, widths=(3,))))


def picked(params, **options):
    return {path for path, chosen in leaves_with_paths(select(params, is_stacked(params), **options)) if chosen}


def test_selects_matrices_of_the_transformer():
    attention = {f"blocks/attention/{name}" for name in ("query", "key", "value", "out")}
    hidden = {f"blocks/mlp/{name}" for name in ("gate", "up", "down")}
    assert picked(TRANSFORMER) == {"embed/tokens", *attention, *hidden, "head/logits"}


def test_only_block_models_are_stacked():
    assert not is_stacked({"embed": 0, "blocks": 0, "head": 0, "more": 0})
    unstacked = {"blocks": [{"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}]}
    assert picked(unstacked) == {"blocks/0/kernel"}
