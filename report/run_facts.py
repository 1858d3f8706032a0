"""report.json: the facts about a run that its logs do not contain, so that the report needs no device and no data.

The file is written when training starts, and replaced at the end with the results that are known only then.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from ..layouts.table import LayoutTable, make_row
from ..layouts.tensor_layout import TensorLayout
from ..mesh.device_mesh import DeviceMesh
from ..mesh.files import write_text
from ..parallel.collectives import Collective
from ..parallel.schedule.csv_file import csv_text, parse_schedule
from ..parallel.schedule.schedule_table import Schedule

NAME = "report.json"


def _parse_table(plain: dict[str, Any]) -> LayoutTable:
    mesh = DeviceMesh(tuple(plain["axes"].values()), tuple(plain["axes"]), plain["devices"])
    rows = []
    for row in plain["rows"]:
        array = jax.ShapeDtypeStruct(tuple(row["shape"]), jnp.dtype(row["dtype"]))
        layout = TensorLayout([tuple(axes) for axes in row["layout"]], mesh)
        rows.append(make_row(str(row["path"]), array, str(row["rule"]), layout))
    return LayoutTable(rows=tuple(rows), treedef=jax.tree.structure([0] * len(rows)), mesh=mesh)


def _table_to_json(table: LayoutTable) -> dict[str, Any]:
    axes = dict(zip(table.mesh.axis_names, table.mesh.shape, strict=True))
    return {"axes": axes, "devices": [str(device) for device in table.mesh.devices.flat], "rows": table.to_json()}


def _parse_schedule(plain: dict[str, str] | None) -> Schedule | None:
    if not plain:
        return None
    return parse_schedule(plain["csv"], plain["name"])


def _schedule_to_json(schedule: Schedule | None) -> dict[str, str] | None:
    if schedule is None:
        return None
    return {"name": schedule.name, "csv": csv_text(schedule)}


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The memory and the communication of one step.

    Attributes:
        held: Kind -> bytes that each device holds, such as parameters and batch.
        compiled: Kind -> bytes of the compiled step on one device; "aliased" is the part of the outputs that reuses the
            arguments, "total" the sum.
        predicted: The collectives that the formulas of the strategies predict.
        found: The collectives of the compiled step.
        notes: Differences between this program and the program of other devices.
        unexpected: The collectives of which there are more than predicted, in words, without those left to XLA.
        fewer: The collectives of which there are fewer than predicted, in words.
        schedule: The schedule of the pipeline; None without a pipeline, or if it is too large to draw.
        schedule_text: The figures of the schedule in words; "" without a pipeline.
    """

    held: Mapping[str, int]
    compiled: Mapping[str, int]
    predicted: tuple[Collective, ...]
    found: tuple[Collective, ...]
    notes: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    fewer: tuple[str, ...] = ()
    schedule: Annotated[Schedule | None, PlainValidator(_parse_schedule), PlainSerializer(_schedule_to_json)] = None
    schedule_text: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The content of report.json.

    Attributes:
        model: The name of the model.
        parameters: The number of parameters.
        data: A description of the data.
        table: The layouts of the parameters. Its devices need not exist.
        costs: The memory and the communication of one step.
        finished: The last step if the run is finished, else 0.
        figures: Results at the end of the run, such as bigram_loss.
        measured: Owner -> the peak of bytes in use, known at the end.
        sample: The text that the model generated at the end, or "".
    """

    model: str
    parameters: int
    data: str
    table: Annotated[LayoutTable, PlainValidator(_parse_table), PlainSerializer(_table_to_json)]
    costs: StepCosts
    finished: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, int] = field(default_factory=dict)
    sample: str = ""


ADAPTER = TypeAdapter(Facts)


def write_facts(folder: Path, facts: Facts) -> None:
    """Writes report.json into the directory of a run, atomically.

    Raises:
        OSError: The file cannot be written; the previous file is unchanged.
    """
    write_text(folder / NAME, ADAPTER.dump_json(facts).decode() + "\n")


def read_facts(folder: Path) -> Facts | None:
    """Reads report.json; returns None if it is missing or corrupt, since the report does not require it."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        return ADAPTER.validate_json((folder / NAME).read_bytes(), strict=True)
    return None
