"""What a step is predicted to move: nothing that the model says of itself is lost, and shapes are asked for."""

import jax
import optax
import pytest
import toy
from spmdkit.models.moe import moe
from spmdkit.models.moe_config import MoEConfig
from spmdkit.parallel import build_step, lay_out
from spmdkit.parallel.collectives import merge
from spmdkit.parallel.sharding.strategies import STRATEGIES, axes_that_split
from spmdkit.parallel.step.composition import as_split
from spmdkit.parallel.step.cost import step_counts

SIZES = {"vocabulary": 32, "length": 16, "layers": 4, "width": 16, "heads": 4, "mlp_width": 32}
MIXTURE = moe(MoEConfig(**SIZES, experts=4, top_k=2))
BATCH = {
    name: jax.ShapeDtypeStruct((16, 16), "float32" if name == "weights" else "int32")
    for name in ("inputs", "targets", "weights")
}


def built(**options):
    layouts = lay_out(MIXTURE, {"expert": 2, "context": 2, "tensor": 2}, devices=toy.devices(8))
    return build_step(MIXTURE, optax.sgd(0.1), layouts, **options)


def test_every_line_of_the_model_belongs_to_one_strategy():
    plan = built().plan
    counts = step_counts(as_split(MIXTURE, plan), plan, BATCH, "cpu")
    inside = [STRATEGIES[name] for name in axes_that_split("work")]
    claimed = [line for strategy in inside for line in strategy.cost(plan, counts, "cpu")]
    assert merge(claimed) == merge(counts.own) != ()


def test_microbatches_repeat_what_the_model_moves():
    once, twice = ({(line.kind, line.axes): line for line in built(accumulate=times).cost(BATCH)} for times in (1, 2))
    key = ("collective-permute", ("context",))
    assert twice[key].count == 2 * once[key].count
    assert twice[key].bytes == once[key].bytes


def test_shapes_are_asked_for():
    with pytest.raises(ValueError, match="give its shapes"):
        built().cost()
