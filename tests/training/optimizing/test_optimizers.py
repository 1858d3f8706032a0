import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.training.optimizing.learning_rates import make_learning_rate
from spmdkit.training.optimizing.optimizers import DIRECTIONS, READS, OptimizerConfig, make_optimizer

NAMES = ("sgd", "adam", "adamw", "lion", "adafactor", "muon")
RATES = {"sgd": 0.3, "adam": 0.1, "adamw": 0.1, "lion": 0.1, "adafactor": 0.3, "muon": 0.3}


def stacked_params(seed=0):
    """A tree like a BlockModel's: two blocks of a matrix and a norm."""
    random = np.random.default_rng(seed)
    shapes = {"embed": {"tokens": (6, 4)}, "blocks": {"kernel": (2, 4, 8), "norm": (2, 4)}, "head": {"logits": (4, 6)}}
    draw = lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def quadratic(params, goal):
    return sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(goal), strict=True)) / 2


def train(config, params, goal, steps, **options):
    optimizer = make_optimizer(config, steps, jax.eval_shape(lambda: params), **options)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(quadratic)(params, goal), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def one_update(config, params, gradients):
    optimizer = make_optimizer(config, 10, params)
    return optimizer.update(gradients, optimizer.init(params), params)[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_minimises_a_quadratic(name):
    params, goal = stacked_params(), stacked_params(seed=1)
    config = OptimizerConfig(name=name, learning_rate=RATES[name], schedule={"name": "linear"})
    trained = train(config, params, goal, 100)
    assert quadratic(trained, goal) < 0.02 * quadratic(params, goal)


def test_the_names_are_these():
    assert tuple(DIRECTIONS) == tuple(READS) == NAMES


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
def test_same_updates_as_optax(config, expected):
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


@pytest.mark.parametrize("name", [name for name in NAMES if name != "adam"])
def test_matrices_are_decayed_and_norms_are_not(name):
    """With gradients of zero the only update is -rate * decay * parameter, exactly."""
    params = stacked_params()
    config = OptimizerConfig(name=name, learning_rate=0.5, weight_decay=0.2)
    updates = one_update(config, params, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_array_equal(updates["blocks"]["norm"], 0)
    for path, update in leaves_with_paths(updates):
        if path != "blocks/norm":
            np.testing.assert_allclose(update, -0.1 * dict(leaves_with_paths(params))[path], rtol=1e-6)


def test_the_schedule_scales_every_update():
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


def test_decay_skip():
    params = stacked_params()
    config = OptimizerConfig(name="sgd", learning_rate=1.0, weight_decay=0.1, decay_skip=("embed/.*",))
    updates = one_update(config, params, jax.tree.map(jnp.zeros_like, params))
    assert [path for path, leaf in leaves_with_paths(updates) if leaf.any()] == ["blocks/kernel", "head/logits"]
    with pytest.raises(ValueError, match=r"optimizer.decay_skip: 'embde/.*' matches no parameter"):
        make_optimizer(OptimizerConfig(decay_skip=("embde/.*",)), 10, params)


def test_stacked_can_be_said():
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


# Muon


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


# The user's own


@pytest.fixture
def user_module(monkeypatch):
    module = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return lambda **objects: vars(module).update(objects)


def test_own_optimizer(user_module):
    def make(learning_rate, scale, num_steps):
        assert num_steps == 10
        return optax.chain(optax.scale(scale), optax.scale_by_learning_rate(learning_rate))

    user_module(make=make)
    config = OptimizerConfig(name="mine:make", learning_rate=0.5, options={"scale": 3.0})
    params = stacked_params()
    np.testing.assert_allclose(one_update(config, params, params)["head"]["logits"], -1.5 * params["head"]["logits"])


def test_optax_by_name():
    config = OptimizerConfig(name="optax:adabelief", learning_rate=0.1, options={"b1": 0.8})
    params, goal = stacked_params(), stacked_params(seed=1)
    assert quadratic(train(config, params, goal, 60), goal) < 0.1 * quadratic(params, goal)


def test_problems_of_own_optimizers(user_module):
    user_module(make=lambda: 3, value=3)
    with pytest.raises(ValueError, match=r"optimizer.name='mine:make' returned a int. It has to return an optax.Grad"):
        make_optimizer(OptimizerConfig(name="mine:make"), 10, {})
    with pytest.raises(ValueError, match=r"optimizer.name='mine:value' is a int, not a function"):
        make_optimizer(OptimizerConfig(name="mine:value"), 10, {})
    with pytest.raises(ValueError, match=r"optimizer.options.b3 is not an option. The options are learning_rate, b1"):
        make_optimizer(OptimizerConfig(name="optax:adabelief", options={"b3": 1}), 10, {})


# Options


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamW"}, "optimizer.name='adamW' is not an optimizer. Did you mean adamw"),
        ({"learning_rate": 0.0}, "optimizer.learning_rate=0.0 has to be over 0"),
        ({"learning_rate": NAN}, "optimizer.learning_rate=nan has to be over 0, and finite"),
        ({"learning_rate": INF}, "optimizer.learning_rate=inf has to be over 0, and finite"),
        ({"weight_decay": NAN}, "optimizer.weight_decay=nan has to be at least 0, and finite"),
        ({"weight_decay": INF}, "optimizer.weight_decay=inf has to be at least 0, and finite"),
        ({"epsilon": NAN}, "optimizer.epsilon=nan has to be over 0, and finite"),
        ({"epsilon": INF}, "optimizer.epsilon=inf has to be over 0, and finite"),
        ({"betas": (NAN, 0.9)}, r"optimizer.betas=\(nan, 0.9\): a decay rate has to be at least 0"),
        ({"name": "sgd", "momentum": NAN}, "optimizer.momentum=nan: a decay rate has to be at least 0"),
        ({"schedule": {"name": "cosine", "final_ratio": NAN}}, "optimizer.schedule.final_ratio=nan has to be a part"),
        ({"schedule": {"name": "cosine", "final_ratio": INF}}, "optimizer.schedule.final_ratio=inf has to be a part"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay=-0.1 has to be at least 0"),
        ({"betas": (0.9, 1.0)}, r"optimizer.betas=\(0.9, 1.0\): a decay rate has to be at least 0 and below 1"),
        ({"name": "sgd", "momentum": 1.5}, "optimizer.momentum=1.5: a decay rate"),
        ({"epsilon": 0.0}, "optimizer.epsilon=0.0 has to be over 0"),
        ({"decay_skip": ("(",)}, r"optimizer.decay_skip: '\(' is not a regular expression"),
        ({"momentum": 0.9}, "optimizer.momentum: adamw does not read it"),
        (
            {"name": "adam", "weight_decay": 0.1},
            "optimizer.weight_decay: adam does not read it. Use optimizer.name=adamw",
        ),
        ({"options": {"b1": 0.8}}, "optimizer.options: adamw does not read it"),
        ({"name": "optax:adam", "weight_decay": 0.1}, "optimizer.weight_decay: .* Give it under optimizer.options"),
    ],
)
def test_problems(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


def test_all_problems_at_once():
    with pytest.raises(ValueError) as error:
        OptimizerConfig(learning_rate=-1.0, momentum=0.5, schedule={"name": "x"})
    assert [line.split("=")[0].split(":")[0] for line in str(error.value).splitlines()] == [
        "optimizer.momentum",
        "optimizer.learning_rate",
        "optimizer.schedule.name",
    ]
