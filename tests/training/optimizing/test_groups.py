"""Groups of parameters: each is updated as if it were alone, with the optimizer that its options say."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.layouts.paths import leaves_with_paths, map_with_path
from spmdkit.training.optimizing.groups import GroupConfig, assign, by_group, labels
from spmdkit.training.optimizing.optimizers import OptimizerConfig, make_optimizer
from support.training import stacked_params

LINEAR = {"name": "linear"}


def params(seed=0):
    return stacked_params(seed, norm=(4,))


def updates(optimizer, steps=2):
    """Its updates in a few steps, by path, at parameters that stay where they are."""
    state, update, found = optimizer.init(params()), jax.jit(optimizer.update), []
    for seed in range(steps):
        change, state = update(params(seed + 1), state, params())
        found.append(dict(leaves_with_paths(change)))
    return found


def same(found, expected, paths):
    for mine, theirs in zip(found, expected, strict=True):
        for path in paths:
            np.testing.assert_allclose(mine[path], theirs[path], rtol=1e-5, atol=1e-6)


BASE = OptimizerConfig(learning_rate=0.1, weight_decay=0.2, betas=(0.8, 0.95), schedule=LINEAR)
ALONE = {
    # what a group says: the section that would say it of all parameters
    "rate": (GroupConfig(learning_rate=0.01), replace(BASE, learning_rate=0.01)),
    "factor": (GroupConfig(learning_rate_factor=0.5), replace(BASE, learning_rate=0.05)),
    "decay": (GroupConfig(weight_decay=0.0), replace(BASE, weight_decay=0.0)),
    "schedule": (GroupConfig(schedule={"name": "constant"}), replace(BASE, schedule={"name": "constant"})),
    "betas": (GroupConfig(betas=(0.5, 0.6)), replace(BASE, betas=(0.5, 0.6))),
    "another optimizer": (GroupConfig(name="sgd"), OptimizerConfig(name="sgd", learning_rate=0.1, schedule=LINEAR)),
    "its options": (
        GroupConfig(name="sgd", momentum=0.9, weight_decay=0.3),
        OptimizerConfig(name="sgd", learning_rate=0.1, schedule=LINEAR, momentum=0.9, weight_decay=0.3),
    ),
    "muon takes all matrices": (
        GroupConfig(name="muon"),
        OptimizerConfig(name="muon", learning_rate=0.1, schedule=LINEAR, muon_skip=()),
    ),
    "adafactor": (GroupConfig(name="adafactor"), OptimizerConfig(name="adafactor", learning_rate=0.1, schedule=LINEAR)),
}
IN_GROUPS = {"head/.*": {"head/logits", "head/norm"}, "blocks/.*": {"blocks/kernel", "blocks/norm"}}


CASES = [(name, "head/.*") for name in ALONE]
CASES += [(name, "blocks/.*") for name in ("muon takes all matrices", "adafactor")]


@pytest.mark.slow_cases("adafactor-head/.*")
@pytest.mark.parametrize(("name", "pattern"), CASES)
def test_groups_are_updated_independently(name, pattern):
    group, alone = ALONE[name]
    found = updates(make_optimizer(replace(BASE, groups={pattern: group}), 10, params()))
    inside = IN_GROUPS[pattern]
    same(found, updates(make_optimizer(alone, 10, params())), inside)
    same(found, updates(make_optimizer(BASE, 10, params())), found[0].keys() - inside)


def test_frozen_parameters_stay_and_have_no_state():
    """Whatever their gradient, decay or group."""
    config = replace(BASE, freeze=("embed/.*", "head/norm"), groups={"head/.*": GroupConfig(learning_rate=1.0)})
    optimizer = make_optimizer(config, 10, params())
    for each in updates(optimizer):
        assert {path for path, leaf in each.items() if not leaf.any()} == {"embed/tokens", "head/norm"}
    slots = [path for path, leaf in leaves_with_paths(jax.eval_shape(optimizer.init, params())) if leaf.shape]
    assert len(slots) == 2 * 3
    assert not [path for path in slots if path.endswith(("embed/tokens", "head/norm"))]
    same(updates(optimizer), updates(make_optimizer(BASE, 10, params())), ["blocks/kernel", "blocks/norm"])


def test_freezes_by_path():
    """As adapters freeze what they adapt."""
    found = updates(make_optimizer(BASE, 10, params(), frozen={"blocks/kernel"}), steps=1)[0]
    assert [path for path, leaf in found.items() if not leaf.any()] == ["blocks/kernel"]
    with pytest.raises(ValueError, match="freeze all parameters: nothing is left to train"):
        make_optimizer(replace(BASE, freeze=("[eh].*",)), 10, params(), frozen={"blocks/kernel", "blocks/norm"})


def test_a_group_of_all_parameters_leaves_no_rest():
    config = replace(BASE, groups={".*": GroupConfig(name="sgd")})
    assert not [leaf for _, leaf in leaves_with_paths(make_optimizer(config, 10, params()).init(params())) if leaf.ndim]


def test_user_optimizer_receives_only_its_group():
    def own(path, leaf):
        return leaf if path.startswith("head") else optax.MaskedNode()

    seen = []

    def init(params):
        seen.append(jax.tree.structure(params))
        return optax.EmptyState()

    def update(updates, state, params=None, *, value, grad, **more):
        assert jax.tree.structure(grad) == jax.tree.structure(updates)
        return jax.tree.map(lambda leaf: leaf * value, updates), state

    label_of = {path: "own" if path.startswith("head") else "rest" for path, _ in leaves_with_paths(params())}
    transformation = optax.GradientTransformationExtraArgs(init, update)
    optimizer = by_group({"own": transformation, "rest": optax.sgd(1.0)}, label_of, params())
    state = optimizer.init(params())
    assert seen == [jax.tree.structure(map_with_path(own, params()))]
    change, _ = optimizer.update(params(1), state, params(), value=jnp.float32(3.0), grad=params(1))
    np.testing.assert_allclose(change["head"]["norm"], 3 * params(1)["head"]["norm"])


# Which parameter is in which group


def test_exact_path_goes_before_patterns():
    groups = assign(("head/.*", "head/norm"), params(), {"embed/tokens"})
    assert groups == {"blocks/kernel": None, "blocks/norm": None, "head/logits": "head/.*", "head/norm": "head/norm"}


@pytest.mark.parametrize(
    ("patterns", "frozen", "message"),
    [
        (("haed/.*",), (), "optimizer.groups: 'haed/.*' matches no parameter. Did you mean head/"),
        (("head/.*", ".*/norm"), (), r"'head/.\*' and '.\*/norm' match head/norm. A parameter is in o"),
        (("head/.*",), ("head/logits", "head/norm"), r"'head/.\*' matches only head/logits, head/norm, which opti"),
    ],
)
def test_rejects_invalid_groups(patterns, frozen, message):
    with pytest.raises(ValueError, match=message):
        assign(patterns, params(), frozenset(frozen))


def test_labels_are_unique_words():
    found = labels({"a": "head/.*", "b": "head", "c": ".*", "d": None, "e": "head.*"})
    assert [*found.values()] == ["rest", "group_head", "group_head_2", "group_all", "group_head_3"]


# Options


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (GroupConfig(), r"optimizer.groups.head/.\* is empty"),
        (GroupConfig(learning_rate=-1.0), r"^optimizer.groups.head/.\*.learning_rate=-1.0 must be positive in float32"),
        (GroupConfig(learning_rate_factor=1e308 * 10), r"learning_rate_factor=inf must be a finite number"),
        (GroupConfig(learning_rate=1.0, learning_rate_factor=1.0), "exclude each other"),
        (GroupConfig(name="adamm"), r"^optimizer.groups.head/.\*.name='adamm' is not an optimizer. Did you mean adam"),
        (GroupConfig(momentum=0.9), r"^optimizer.groups.head/.\*.momentum: adamw does not use it"),
        (GroupConfig(schedule={"name": "cosin"}), r"^optimizer.groups.head/.\*.schedule.name='cosin' is not a sched"),
    ],
)
def test_rejects_invalid_group_options(group, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(groups={"head/.*": group})


def test_rejects_invalid_patterns():
    with pytest.raises(ValueError, match=r"optimizer.groups: '\(' is not a valid regular expression"):
        OptimizerConfig(groups={"(": GroupConfig(learning_rate=1.0)})
    with pytest.raises(ValueError, match=r"optimizer.freeze: '\(' is not a valid regular expression"):
        OptimizerConfig(freeze=("(",))


def test_schedule_error_names_its_group():
    config = replace(BASE, groups={"head/.*": GroupConfig(schedule={"name": "linear", "warmup_steps": 50})})
    with pytest.raises(ValueError, match=r"^optimizer.groups.head/.\*.schedule.warmup_steps=50, but .* train.steps=10"):
        make_optimizer(config, 10, params())
