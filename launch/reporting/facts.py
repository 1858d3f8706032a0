"""report.json: what the report of a run needs beyond its logs, so that no device and no data are needed to draw it.

It is written as a whole when the run starts to train, and again at its very end, with what is known only then.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ...layouts.table import LayoutTable, make_row
from ...layouts.tensor_layout import TensorLayout
from ...mesh.device_mesh import DeviceMesh
from ...mesh.files import write_text
from ...parallel.collectives import Collective
from ...parallel.schedule.csv_file import csv_text, parse_schedule
from ...parallel.schedule.table import Schedule
from ...training.report.costs import StepCosts
from ..drawing.schedule_svg import draw_svg
from .facts_form import check_form

NAME = "report.json"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run besides its logs.

    Attributes:
        model: its name.
        parameters: how many.
        data: a description.
        mesh: axis -> size; its devices by name, slowest axis first.
        layouts: those of the parameters, as `LayoutTable.to_json` gives them.
        costs: what the step holds and moves, but for what was measured and for the picture of the schedule.
        schedule: name and csv of the pipeline's schedule, where it is drawn. The picture is drawn anew: a picture in a
            file is text of whoever wrote the file, and a page would run what it holds.
        finished: the last step, where the run has come to its very end; 0 before.
        figures: what is known only then, such as bigram_loss.
        measured: whose -> the most bytes in use at once, known then too.
        sample: what the model wrote then; "" for nothing.
    """

    model: str
    parameters: int
    data: str
    mesh: Mapping[str, Any]
    layouts: list[dict[str, Any]]
    costs: Mapping[str, Any]
    finished: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, int] = field(default_factory=dict)
    sample: str = ""
    schedule: Mapping[str, str] = field(default_factory=dict)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh; no device has to be there."""
        axes = self.mesh["axes"]
        return DeviceMesh(tuple(axes.values()), tuple(axes), self.mesh["devices"])

    @property
    def table(self) -> LayoutTable:
        """The layouts of the parameters."""
        mesh = self.device_mesh
        rows = tuple(
            make_row(
                row["path"],
                jax.ShapeDtypeStruct(tuple(row["shape"]), jnp.dtype(row["dtype"])),
                row["rule"],
                TensorLayout([tuple(axes) or None for axes in row["layout"]], mesh),
            )
            for row in self.layouts
        )
        return LayoutTable(rows=rows, treedef=jax.tree.structure([0] * len(rows)), mesh=mesh)

    @property
    def step_costs(self) -> StepCosts:
        """What the step holds and moves, with what was measured."""
        lists = {name: tuple(map(_collective, self.costs[name])) for name in ("predicted", "found")}
        texts = {name: tuple(self.costs[name]) for name in ("notes", "unexpected") if self.costs.get(name) is not None}
        own = {**texts, "measured": self.measured, "schedule_svg": self._picture()}
        return StepCosts(**{**self.costs, **lists, **own})

    def _picture(self) -> str:
        return draw_svg(parse_schedule(self.schedule["csv"], self.schedule["name"])) if self.schedule else ""


def facts_of(
    model: str, parameters: int, data: str, table: LayoutTable, costs: StepCosts, schedule: Schedule | None = None
) -> Facts:
    """What is known of a run that starts.

    Args:
        model: Its name.
        parameters: How many.
        data: A description.
        table: The layouts of the parameters.
        costs: What its step holds and moves.
        schedule: That of its pipeline, where the report draws it.
    """
    mesh = table.mesh
    lists = {name: [asdict(line) for line in getattr(costs, name)] for name in ("predicted", "found")}
    plain = {**costs._asdict(), **lists, "held": dict(costs.held), "compiled": dict(costs.compiled)}
    del plain["measured"], plain["schedule_svg"]
    return Facts(
        model=model,
        parameters=parameters,
        data=data,
        mesh={
            "axes": dict(zip(mesh.axis_names, mesh.shape, strict=True)),
            "devices": [str(device) for device in mesh.devices.flat],
        },
        layouts=table.to_json(),
        costs=plain,
        schedule={"name": schedule.name, "csv": csv_text(schedule)} if schedule is not None else {},
    )


def write_facts(folder: Path, facts: Facts) -> None:
    """Writes report.json into the folder of a run, in one piece.

    Raises:
        OSError: It cannot be written; what was there is as it was.
    """
    plain = {**vars(facts), "figures": dict(facts.figures), "measured": dict(facts.measured)}
    write_text(folder / NAME, json.dumps(plain) + "\n")


def read_facts(folder: Path) -> Facts | None:
    """Reads report.json; None where there is none, as of earlier versions, or it is damaged: it can be missed."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        facts = Facts(**json.loads((folder / NAME).read_bytes()))
        check_form(vars(facts))
        _ = facts.table, facts.step_costs  # of no use but for their errors
        return facts
    return None


def _collective(fields: Mapping[str, Any]) -> Collective:
    return Collective(**{**fields, "axes": tuple(fields["axes"])})
