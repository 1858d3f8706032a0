"""The keys that may change when a run resumes: one table for the check, its message, the help and the docs."""

from typing import Literal, NamedTuple

Kind = Literal["never", "fits", "rounding", "forward", "any"]


class Rule(NamedTuple):
    """The rule for some keys at a restart.

    Attributes:
        kind: One of `KINDS`.
        keys: Keys or whole sections; if several rules apply to a key, the longest wins.
        why: The reason.
    """

    kind: Kind
    keys: tuple[str, ...]
    why: str


KINDS: dict[Kind, str] = {
    "never": "no",
    "fits": "if the checkpoint still fits",
    "rounding": "yes, same results up to rounding",
    "forward": "yes, from the next step on",
    "any": "yes, it does not affect the numbers",
}
"""Kind -> the answer to whether a restart may change such a key."""

RULES = (
    Rule("never", ("model",), "the checkpoints contain the parameters of this model"),
    Rule("never", ("data",), "the position in the data is a number of batches in this order"),
    Rule("never", ("train.global_batch",), "the position in the data is counted in batches of this size"),
    Rule("never", ("run.seed",), "it determines the order of the data and dropout"),
    Rule("never", ("optimizer.name",), "the checkpoints contain the state of this optimizer"),
    Rule("never", ("precision.params",), "the checkpoints contain parameters of this dtype"),
    Rule(
        "fits",
        ("optimizer.freeze", "optimizer.groups", "optimizer.momentum", "optimizer.muon_skip"),
        "they determine the arrays in the optimizer state",
    ),
    Rule("fits", ("optimizer.schedule", "optimizer.options"), "plateau and your own optimizer may add arrays"),
    Rule("fits", ("train.not_finite",), "skip adds counters to the optimizer state"),
    Rule(
        "fits",
        ("optimizer.ema.decay", "precision.loss_scale", "precision.compute", "precision.reduce"),
        "the state contains the averages and the loss scale, which `auto` uses only in float16",
    ),
    Rule("fits", ("strategy.data.compress", "strategy.data.local_steps"), "each device has its own arrays"),
    Rule("fits", ("callbacks",), "a callback that changes the learning rate adds a factor to the state"),
    Rule("rounding", ("strategy", "layouts", "run.simulate"), "arrays are stored independently of the mesh"),
    Rule("rounding", ("train.accumulate", "train.remat"), "they determine how a step is computed, not its result"),
    Rule("forward", ("train.steps",), "schedules that depend on the number of steps change with it"),
    Rule(
        "forward",
        (
            *("optimizer.learning_rate", "optimizer.weight_decay", "optimizer.decay_skip"),
            *("optimizer.betas", "optimizer.epsilon", "train.clip_norm", "train.most_not_finite"),
            *("precision.loss_scale_interval", "strategy.data.outer_learning_rate", "strategy.data.outer_momentum"),
        ),
        "they are read at every step",
    ),
    Rule("any", ("precision.loss_scale_initial",), "only step 0 uses it; a restart uses the scale of the checkpoint"),
    Rule("any", ("run.dir", "run.root", "run.allow"), "a run directory may be moved with its files"),
    Rule(
        "any",
        ("data.prefetch", "data.threads", "data.layout", "model.check"),
        "they determine how data is read and checked, not its contents",
    ),
    Rule("any", ("run.cache", "run.xla"), "they determine how programs are compiled and cached"),
    Rule("any", ("optimizer.ema.evaluate",), "it selects the parameters for evaluation"),
    Rule("any", ("run.log_every", "eval", "checkpoint", "sample"), "they determine what is logged, evaluated and kept"),
    Rule("any", ("timeouts", "guards", "launch"), "they determine how processes are started and monitored"),
)
"""Every key of the schema has a rule."""


def rule_of(key: str) -> Rule | None:
    """Returns the rule of a dotted key, or None if the key is not in the schema."""
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((found for name in above if (found := _BY_KEY.get(name))), None)


def describe_restarts() -> str:
    """Returns the table for `spmdkit train --help-restart`."""
    lines = ["| keys | may change at a restart | why |", "|---|---|---|"]
    for kind, text in KINDS.items():
        lines += [
            f"| {', '.join(f'`{key}`' for key in rule.keys)} | {text} | {rule.why} |"
            for rule in RULES
            if rule.kind == kind
        ]
    return "\n".join(["The keys that may change when a run resumes from a checkpoint.", "", *lines])


_BY_KEY = {key: rule for rule in RULES for key in rule.keys}
