"""What a config says about values that are not finite, by its two keys."""

import pytest
from spmdkit.configs import ConfigError, load_config
from spmdkit.configs.not_finite import NotFinite, optimizer_of, policy_of


@pytest.mark.parametrize(
    ("given", "policy", "left_out"),
    [
        ([], NotFinite("stop", 0, "train.not_finite"), 0),
        (["train.not_finite=skip"], NotFinite("skip", 3, "train.not_finite"), 3),
        (["train.not_finite=skip", "train.most_not_finite=7"], NotFinite("skip", 7, "train.not_finite"), 7),
        (["optimizer.skip_not_finite=2"], NotFinite("skip", 2, "optimizer.skip_not_finite"), 2),
        (["train.not_finite=roll_back"], NotFinite("roll_back", 3, "train.not_finite"), 0),
    ],
)
def test_one_policy(given, policy, left_out):
    config = load_config("mlp", given)
    assert policy_of(config) == policy
    assert optimizer_of(config).skip_not_finite == left_out


@pytest.mark.parametrize(
    ("policy", "remedy"),
    [("skip", "keep train.not_finite and train.most_not_finite=2."), ("roll_back", "keep train.not_finite.")],
)
def test_two_policies_are_one_too_many(policy, remedy):
    with pytest.raises(ConfigError, match=rf"both say what happens .* {remedy}"):
        load_config("mlp", ["optimizer.skip_not_finite=2", f"train.not_finite={policy}"])


def test_a_policy_of_no_such_name():
    with pytest.raises(ConfigError, match=r"train\.not_finite"):
        load_config("mlp", ["train.not_finite=rollback"])


def test_no_run_goes_back_for_what_loss_scaling_leaves_out():
    given = ["precision.compute=float16", "train.not_finite=roll_back"]
    with pytest.raises(ConfigError, match=r"dynamic loss scaling leaves out .* Set train\.not_finite=stop"):
        load_config("mlp", given)
    assert load_config("mlp", [*given, "precision.loss_scale=1024"]).train.not_finite == "roll_back"
