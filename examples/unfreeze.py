"""Fine-tuning in two phases: the head alone, then all of it once the evaluation loss falls no more: unfreeze.yaml.

What does not train yet has its updates multiplied by 0, a number in the optimizer's state. A callback changes it
between two steps: nothing compiles again, all processes do it after the same step, and checkpoints hold it.
"""

import optax
from spmdkit.training.callbacks.rate_factor import in_parts

import spmdkit


def optimizer(learning_rate):
    """`optimizer.name: unfreeze:optimizer`. Adam; the convolutions and their norms wait."""
    return in_parts(optax.adam(learning_rate), {"backbone": "(Conv|BatchNorm)_.*"})


class Unfreeze(spmdkit.Callback):
    """Lets a part of the parameters train after `patience` evaluations without a lower loss."""

    monitors = "eval_loss"

    def __init__(self, part, patience, factor, min_delta):
        self.part, self.patience, self.factor, self.min_delta = part, patience, factor, min_delta
        self.best, self.waited = float("inf"), 0

    def on_evaluation_end(self, run, metrics):
        """Counts evaluations since the best, and asks for the part to train."""
        if metrics["eval_loss"] < self.best - self.min_delta:
            self.best, self.waited = metrics["eval_loss"], 0
            return
        self.waited += 1
        if self.waited >= self.patience and not run.parts[self.part]:
            run.say(f"Step {run.step}: no lower loss in {self.waited} evaluations; {self.part} trains from here on.")
            run.train_part(self.part, self.factor)

    def state(self):
        """Kept with each checkpoint."""
        return {"best": self.best, "waited": self.waited}

    def restore(self, state):
        """Goes on from there."""
        self.best, self.waited = state["best"], state["waited"]


def on_plateau(part="backbone", patience=1, factor=0.3, min_delta=0.02):
    """`callbacks: [{name: "unfreeze:on_plateau"}]`; `factor` is the part's share of the learning rate."""
    return Unfreeze(part, patience, factor, min_delta)
