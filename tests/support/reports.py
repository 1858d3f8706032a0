"""Facts and records of runs that never ran, and a strict reader of the report pages."""

from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
from spmdkit.layouts.resolve import resolve
from spmdkit.layouts.table import LayoutTable
from spmdkit.layouts.tensor_layout import TensorLayout
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel.collectives import Collective
from spmdkit.report.run_facts import Facts, StepCosts
from spmdkit.report.run_record import RunRecord

VOID = {"meta", "br"}
METRICS = [
    {"step": 10, "loss": 4.5, "grad_norm": 1.5, "tokens_per_second": 9000.0, "seconds": 0.5, "learning_rate": 1e-3},
    {"step": 20, "loss": 3.25, "grad_norm": 1.25, "tokens_per_second": 11000.0, "seconds": 0.25, "eval_loss": 3.375},
    {"step": 30, "loss": 2.125, "grad_norm": 1.0, "tokens_per_second": 10000.0, "seconds": 0.25, "eval_loss": 2.25},
]
COLLECTIVES = (
    Collective("all-gather", ("fsdp",), 1057, 6 << 20),
    Collective("all-reduce", ("data", "fsdp"), 2, 4608),
    Collective("collective-permute", ("pipe",), 66, 4 << 20),
)
COSTS = StepCosts(
    held={"parameters": 823808, "optimizer": 1647616, "batch": 6144},
    compiled={"arguments": 3 << 20, "outputs": 2 << 20, "temporaries": 24 << 20, "aliased": 2 << 20, "total": 27 << 20},
    predicted=COLLECTIVES,
    found=COLLECTIVES,
    notes=("a note",),
    schedule_text="a schedule",
)


def table_on(mesh: DeviceMesh, num_weights: int = 1) -> LayoutTable:
    """Three blocks, a norm and some weights; matrices are split over fsdp."""
    weights = {f"w{'x' * i}": jax.ShapeDtypeStruct((64, 32), jnp.float32) for i in range(num_weights)}
    blocks = [{"kernel": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)} for _ in range(3)]
    params = {"blocks": blocks, "norm": jax.ShapeDtypeStruct((32,), jnp.float32), **weights}

    def default(path, leaf):
        split = len(leaf.shape) == 2
        return TensorLayout(("fsdp", None) if split else (None,), mesh), "fsdp: dim 0" if split else "small <16 KiB>"

    return resolve(params, mesh, default=default)


def make_facts(**changes) -> Facts:
    """The facts of a run on devices that do not exist."""
    mesh = DeviceMesh.of([f"cuda:{number}" for number in range(8)], data=2, fsdp=4)
    given = {"model": "mlp", "parameters": 2464, "data": "digits", "table": table_on(mesh), "costs": COSTS}
    return Facts(**{**given, "figures": {"bigram_loss": 2.4812}, "finished": 30, **changes})


def make_record(**changes) -> RunRecord:
    """The record of a finished run."""
    config = {"run": {"dir": "quick & easy", "seed": 0}, "train": {"steps": 30}}
    return RunRecord(**{"folder": Path("run"), "config": config, "metrics": METRICS, "facts": make_facts(), **changes})


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order. Collects text by class or tag, and all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            for name in {self.open[-1][0], *(word for _, css in self.open for word in (css, *css.split()))}:
                self.texts.setdefault(name, []).append(data.strip("\n"))

    def text(self, name: str) -> str:
        return "".join(self.texts.get(name, []))
