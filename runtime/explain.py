"""The memory and communication of a run, from its layouts and its compiled step."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax

from ..layouts.sizes import format_bytes
from ..layouts.table import LayoutTable
from ..mesh.errors import docs_url, printable
from ..parallel.collectives import Collective
from ..parallel.schedule.schedule_table import Schedule
from ..parallel.schedule.timing import measure, schedule_to_json, summarize
from ..parallel.verification.collective_check import check_collectives, describe_comparison
from .build_run import Built

REMEDY = (
    f"How to read the rows, and what to do: {docs_url('troubleshooting', 'collectives-that-are-not-as-predicted')}. "
    "`spmdkit verify` checks if the numbers are those of one device all the same."
)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The memory and communication of a run, known without training.

    Attributes:
        mesh: The mesh, drawn.
        axes: Mesh axis -> size.
        network_axes: The axes that cross processes, so hosts.
        target: The accelerators that the step is compiled for, if they are not on this machine.
        table: The layouts of the parameters.
        bytes_per_device: Kind -> bytes on each device: parameters, optimizer, slow links (if they need any), gradients,
            batch.
        compiled: XLA's memory analysis of one device, in bytes: arguments, outputs, temporaries, aliased (the part of
            the outputs that reuses the arguments), and their total.
        predicted: The collectives of one step by the strategies' own formulas.
        found: The collectives of the compiled step.
        left_to_xla: Those of `found` that no strategy predicts, because XLA decides on them.
        of_the_model: Those of `found` that the model itself asks for, or that contain some of these.
        unexpected: One line for each kind and set of axes with more than predicted, with the bytes.
        fewer: One line for each kind and set of axes with fewer than predicted, with what XLA merged or removed.
        schedule: The pipeline schedule, if the mesh has the axis `pipe`.
        notes: Differences between this program and that of other devices.
    """

    mesh: str
    axes: dict[str, int]
    table: LayoutTable
    bytes_per_device: dict[str, int]
    compiled: dict[str, int]
    predicted: tuple[Collective, ...]
    found: tuple[Collective, ...]
    left_to_xla: tuple[Collective, ...] = ()
    of_the_model: tuple[Collective, ...] = ()
    unexpected: tuple[str, ...] = ()
    fewer: tuple[str, ...] = ()
    network_axes: tuple[str, ...] = ()
    target: str | None = None
    schedule: Schedule | None = None
    notes: tuple[str, ...] = ()

    def link(self, line: Collective) -> str:
        """Returns the slowest link of a collective: "network" between hosts, or "host" within one."""
        return "network" if set(line.axes) & set(self.network_axes) else "host"

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for `--json`; `schedule` only if there is one."""
        schedule = self.schedule
        return {
            "target": self.target,
            "mesh": self.axes,
            "layouts": self.table.to_json(),
            "bytes_per_device": self.bytes_per_device,
            "compiled_memory": self.compiled,
            "collectives": [{**_to_json(line), "link": self.link(line)} for line in self.found],
            "predicted_collectives": [{**_to_json(line), "link": self.link(line)} for line in self.predicted],
            "as_predicted": not self.unexpected,
            "not_as_predicted": list(self.unexpected),
            "fewer_than_predicted": list(self.fewer),
            "notes": list(self.notes),
            **({"schedule": schedule_to_json(schedule, measure(schedule))} if schedule else {}),
        }

    def __str__(self) -> str:
        parts = [
            self.mesh,
            self.table.text(),
            _listing("Bytes on each device", self.bytes_per_device),
            _listing("Memory of the compiled step, each device", self.compiled),
            "\n".join(_collectives(self)),
        ]
        if self.unexpected:
            parts.append("\n".join(["Not as predicted", *(f"  {line}" for line in self.unexpected), REMEDY]))
        if self.fewer:
            parts.append(
                "\n".join(["Fewer than predicted, which is not a problem", *(f"  {line}" for line in self.fewer)])
            )
        parts += [f"Note: {note}" for note in self.notes]
        if self.schedule:
            parts.append(describe_schedule(self.schedule))
        return printable("\n\n".join(parts))


def explain_built(built: Built) -> Explanation:
    """Compiles the step of a run and returns its memory and communication."""
    step, layouts, mesh = built.step, built.layouts, built.layouts.mesh
    return Explanation(
        mesh=str(mesh),
        axes=dict(zip(mesh.axis_names, mesh.shape, strict=True)),
        network_axes=mesh.axes_across_processes,
        target=mesh.target.text if mesh.target else None,
        table=layouts.table,
        bytes_per_device=state_bytes(built),
        compiled=compiled_memory(step.compile(built.batch)),
        **check_collectives(step, built.batch)._asdict(),
        schedule=layouts.pipeline.schedule if layouts.pipeline else None,
        notes=built.notes,
    )


def state_bytes(built: Built) -> dict[str, int]:
    """Returns the bytes on each device that follow from the layouts, by kind."""
    step, table = built.step, built.layouts.table
    batch = sum(leaf.size * leaf.dtype.itemsize for leaf in built.batch.values())
    return {
        "parameters": table.bytes_per_device,
        "optimizer": step.optimizer_table.bytes_per_device,
        **({"slow links": step.extra_table.bytes_per_device} if step.extra_table.rows else {}),
        "gradients": table.bytes_per_device,
        "batch": batch // built.layouts.eval_rows.total,
    }


def describe_schedule(schedule: Schedule) -> str:
    """Returns the costs of a schedule as a few lines of text, in units of a pass."""
    title = f"Pipeline schedule {schedule.name}, {schedule.microbatches:,} microbatches, in units of a pass"
    return "\n".join([title, *(f"  {line}" for line in summarize(schedule, measure(schedule)).splitlines())])


def compiled_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns the bytes of a compiled program on one device; the backend's own peak omits temporaries on CPU."""
    memory: Any = compiled.memory_analysis()
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
    }
    return {**sizes, "total": sum(sizes.values()) - 2 * sizes["aliased"]}


def _to_json(collective: Collective) -> dict[str, Any]:
    return {**asdict(collective), "axes": list(collective.axes)}


def _listing(title: str, sizes: dict[str, int]) -> str:
    return "\n".join([title, *(f"  {name:<12} {format_bytes(size):>12}" for name, size in sizes.items())])


def _collectives(explanation: Explanation) -> Iterator[str]:
    """Yields the lines about the collectives of the compiled step."""
    verdict = describe_comparison(explanation.unexpected, explanation.fewer)
    if explanation.predicted == explanation.found:
        verdict = f"exactly {verdict}"
    yield f"Collectives of the compiled step, {verdict}"
    for line in explanation.found:
        left = "   left to XLA" if line in explanation.left_to_xla else ""
        left = "   with the model's own" if line in explanation.of_the_model else left
        axes = f"{' x '.join(line.axes):<14}"
        link = f"   {explanation.link(line)}" if explanation.network_axes else ""
        yield f"  {line.kind:<18} over {axes} {line.count:>5,} a step {format_bytes(line.bytes):>12}{link}{left}"
    if not explanation.found:
        yield "  none"
