"""What a run that was never trained has left: metrics, and what report.json says of it."""

import jax
from spmdkit.launch.reporting.facts import facts_of
from spmdkit.layouts.resolve import resolve
from spmdkit.layouts.tensor_layout import TensorLayout
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel.collectives import Collective
from spmdkit.training.report.costs import StepCosts

METRICS = [
    {"step": 5, "loss": 3.0, "seconds": 0.5, "tokens_per_second": 100.0, "eval_loss": 2.5, "learning_rate": 0.1},
    {"step": 10, "loss": 2.0, "seconds": 0.25, "tokens_per_second": 200.0, "eval_loss": 2.75, "accuracy": 0.5},
]
COSTS = StepCosts(
    held={"parameters": 10},
    compiled={"arguments": 3, "total": 7},
    predicted=(Collective("all-gather", ("fsdp",), 2, 64),),
    found=(Collective("all-gather", ("fsdp",), 2, 64), Collective("all-reduce", ("data", "fsdp"), 1, 4)),
    notes=("a note",),
    schedule_text="a schedule",
)


def a_table():
    """Two arrays, one of them split over both axes, on devices that are nowhere."""
    mesh = DeviceMesh.of([f"cuda:{number}" for number in range(8)], data=2, fsdp=4)
    shapes = {"w": jax.ShapeDtypeStruct((16, 8), "bfloat16"), "b": jax.ShapeDtypeStruct((), "float32")}

    def default(path, leaf):
        return TensorLayout((("data", "fsdp"), None) if leaf.shape else (), mesh), "a rule"

    return resolve(shapes, mesh, default=default)


def some_facts():
    return facts_of("mlp", 128, "digits", a_table(), COSTS)
