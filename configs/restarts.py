"""Which keys of a config may change when a run goes on from a checkpoint: one table, for the check, its message, the
help and the docs."""

from typing import Literal, NamedTuple

Kind = Literal["never", "fits", "rounding", "forward", "any"]


class Rule(NamedTuple):
    """What a restart may do to some keys.

    Attributes:
        kind: one of `KINDS`.
        keys: keys, or sections with all that is in them; of several rules that a key falls under, the longest counts.
        why: in words.
    """

    kind: Kind
    keys: tuple[str, ...]
    why: str


KINDS: dict[Kind, str] = {
    "never": "no",
    "fits": "where the checkpoint still fits",
    "rounding": "yes, the same run up to rounding",
    "forward": "yes, from the next step on",
    "any": "yes, no number depends on it",
}
"""Kind -> whether a restart may change such a key."""

RULES = (
    Rule("never", ("model",), "its checkpoints hold the parameters of this model"),
    Rule("never", ("data",), "its position in the data is a number of batches in this order"),
    Rule("never", ("train.global_batch",), "its position in the data is counted in batches of this size"),
    Rule("never", ("run.seed",), "it is the order of the data, and dropout"),
    Rule("never", ("optimizer.name",), "its checkpoints hold the state of this optimizer"),
    Rule("never", ("precision.params",), "its checkpoints hold parameters of this dtype"),
    Rule(
        "fits",
        ("optimizer.freeze", "optimizer.groups", "optimizer.momentum", "optimizer.muon_skip"),
        "they say which arrays the state of the optimizer holds",
    ),
    Rule("fits", ("optimizer.schedule", "optimizer.options"), "plateau, or an optimizer of your own, may keep arrays"),
    Rule("fits", ("train.not_finite", "optimizer.skip_not_finite"), "skip counts in the state of the optimizer"),
    Rule(
        "fits",
        ("optimizer.ema.decay", "precision.loss_scale", "precision.compute", "precision.reduce"),
        "the state holds the averages, and the scale, which `auto` keeps in float16 alone",
    ),
    Rule("fits", ("strategy.data.compress", "strategy.data.local_steps"), "devices keep arrays of their own"),
    Rule("fits", ("callbacks",), "one that changes the learning rate adds a factor to the state"),
    Rule("rounding", ("strategy", "layouts", "run.simulate"), "arrays are stored whole, whatever mesh wrote them"),
    Rule("rounding", ("train.accumulate", "train.remat"), "they say how a step is computed, not what"),
    Rule("forward", ("train.steps",), "a schedule that depends on the number of steps changes with it"),
    Rule(
        "forward",
        (
            *("optimizer.learning_rate", "optimizer.weight_decay", "optimizer.decay_skip"),
            *("optimizer.betas", "optimizer.epsilon", "train.clip_norm", "train.most_not_finite"),
            *("precision.loss_scale_interval", "strategy.data.outer_learning_rate", "strategy.data.outer_momentum"),
        ),
        "every step reads them anew",
    ),
    Rule(
        "any", ("precision.loss_scale_initial",), "step 0 alone reads it; a restart takes the scale of the checkpoint"
    ),
    Rule("any", ("run.dir", "run.root", "run.allow"), "a run may be moved, with its files"),
    Rule(
        "any",
        ("data.prefetch", "data.threads", "data.layout", "model.check"),
        "they say how, not what, is read and checked",
    ),
    Rule("any", ("run.cache", "run.xla"), "they say how programs are compiled and kept"),
    Rule("any", ("optimizer.ema.evaluate",), "it says which parameters are evaluated"),
    Rule("any", ("run.log_every", "eval", "checkpoint", "sample"), "they say what is looked at and kept"),
    Rule("any", ("timeouts", "guards", "launch"), "they say how processes are started and watched"),
)
"""Every key of the schema falls under one."""


def rule_of(key: str) -> Rule | None:
    """The rule that a key falls under.

    Args:
        key: Dotted.

    Returns:
        None of a key that is not in the schema.
    """
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((found for name in above if (found := _BY_KEY.get(name))), None)


def is_fixed(key: str) -> bool:
    """Whether a run cannot change a key halfway."""
    rule = rule_of(key)
    return rule is not None and rule.kind == "never"


def describe_restarts() -> str:
    """The table for `spmdkit train --help-restart`."""
    lines = ["| keys | may change at a restart | why |", "|---|---|---|"]
    for kind, text in KINDS.items():
        lines += [
            f"| {', '.join(f'`{key}`' for key in rule.keys)} | {text} | {rule.why} |"
            for rule in RULES
            if rule.kind == kind
        ]
    return "\n".join(["What may change when a run goes on from a checkpoint.", "", *lines])


_BY_KEY = {key: rule for rule in RULES for key in rule.keys}
