"""What a run does where a loss, a gradient or a parameter is not finite: `train.not_finite`, for all who have to know.

stop         it ends, exit code 3
skip         the update is left out, and the state stays as it was
roll_back    it goes back to its newest checkpoint, and leaves the batch out from then on
"""

from dataclasses import replace
from typing import Literal, NamedTuple

from ..training.optimizing.optimizer_config import OptimizerConfig
from .errors import Problem
from .schema import Config


class NotFinite(NamedTuple):
    """The policy of a run.

    Attributes:
        policy: what it does.
        most: updates in a row that may be left out, or rollbacks of the whole run; 0 where it stops.
        key: of the config, for messages.
    """

    policy: Literal["stop", "skip", "roll_back"]
    most: int
    key: str


def policy_of(config: Config) -> NotFinite:
    """The policy of a run; `optimizer.skip_not_finite`, its older name, counts as `skip`."""
    if config.train.not_finite == "stop" and config.optimizer.skip_not_finite:
        return NotFinite("skip", config.optimizer.skip_not_finite, "optimizer.skip_not_finite")
    most = 0 if config.train.not_finite == "stop" else config.train.most_not_finite
    return NotFinite(config.train.not_finite, most, "train.not_finite")


def optimizer_of(config: Config) -> OptimizerConfig:
    """The section `optimizer`, told how many updates in a row it leaves out."""
    policy = policy_of(config)
    return replace(config.optimizer, skip_not_finite=policy.most if policy.policy == "skip" else 0)


def policy_problems(config: Config) -> list[Problem]:
    """Says where two keys contradict each other about what happens."""
    return [*_given_twice(config), *_left_out_by_scaling(config)]


def _left_out_by_scaling(config: Config) -> list[Problem]:
    precision = config.precision
    if config.train.not_finite != "roll_back" or precision.scaling != "dynamic":
        return []
    return [
        Problem(
            "train.not_finite",
            f"train.not_finite=roll_back with precision.compute={precision.compute} and "
            f"precision.loss_scale={precision.loss_scale}: dynamic loss scaling leaves out every update that is not "
            "finite and goes on, so that the run would never go back for it. Set train.not_finite=stop, "
            "precision.loss_scale to a number, or precision.compute=bfloat16.",
        )
    ]


def _given_twice(config: Config) -> list[Problem]:
    older, train = config.optimizer.skip_not_finite, config.train
    if not older or train.not_finite == "stop":
        return []
    remedy = f" and train.most_not_finite={older}" if train.not_finite == "skip" else ""
    return [
        Problem(
            "optimizer.skip_not_finite",
            f"optimizer.skip_not_finite={older} and train.not_finite={train.not_finite} both say what happens where a "
            f"gradient is not finite. Take out optimizer.skip_not_finite; keep train.not_finite{remedy}.",
        )
    ]
