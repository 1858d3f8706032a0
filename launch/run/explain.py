"""`spmdkit explain`: what a run will hold and move on each device, read from its layouts and its compiled step."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax

from ...configs.schema import Config
from ...layouts.sizes import format_bytes
from ...layouts.table import LayoutTable
from ...mesh.errors import docs_url
from ...mesh.text import printable
from ...parallel.collectives import Collective
from ...parallel.schedule.table import Schedule
from ...parallel.schedule.timing import measure
from ...parallel.verification.collective_check import check_collectives
from ..drawing import schedule as schedule_command
from .build import Built, build, keep_compiled, prepare_devices

REMEDY = (
    f"How to read the rows, and what to do: {docs_url('troubleshooting', 'collectives-that-are-not-as-predicted')}. "
    "`spmdkit verify` says whether the numbers are those of one device all the same."
)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a run will hold and move; nothing was trained to know it.

    Attributes:
        mesh: the mesh, drawn.
        axes: mesh axis -> size.
        table: layouts of the parameters.
        bytes_per_device: kind -> bytes on each device: parameters, optimizer, what slow links need (where they do),
            gradients, batch.
        compiled: what XLA's memory analysis says of one device, in bytes: arguments, outputs, temporaries, aliased (of
            the outputs, what reuses the arguments), and their total.
        predicted: collectives of one step by the strategies' own formulas.
        found: collectives of the compiled step.
        left_to_xla: of those found, the ones that no strategy predicts: XLA decides on them.
        of_the_model: of those found, the ones among which are sums of the model itself that are not compared.
        unexpected: one line for each kind and set of axes that is not as predicted, with the bytes.
        schedule: who does what when, where the mesh has the axis `pipe`.
        notes: where this program is not the one that other devices would run.
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
    schedule: Schedule | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same as plain values, for `--json`; `schedule` only where there is one."""
        schedule = self.schedule
        return {
            "mesh": self.axes,
            "layouts": self.table.to_json(),
            "bytes_per_device": self.bytes_per_device,
            "compiled_memory": self.compiled,
            "collectives": [_line(collective) for collective in self.found],
            "predicted_collectives": [_line(collective) for collective in self.predicted],
            "as_predicted": not self.unexpected,
            "not_as_predicted": list(self.unexpected),
            "notes": list(self.notes),
            **({"schedule": schedule_command.to_json(schedule, measure(schedule))} if schedule else {}),
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
        parts += [f"Note: {note}" for note in self.notes]
        if self.schedule:
            parts.append(schedule_figures(self.schedule))
        return printable("\n\n".join(parts))


def explain(config: Config) -> Explanation:
    """Lays out and compiles the run of a config, without training.

    Raises:
        UserError: The config does not work out, as `build` says.
    """
    prepare_devices(config)
    keep_compiled(config)
    return explain_built(build(config), compiles_apart=True)


def explain_built(built: Built, *, compiles_apart: bool = False) -> Explanation:
    """Compiles the step of a run and reads from it what it holds and moves.

    Args:
        built: The run.
        compiles_apart: Compile gradients and update by themselves as well where the step is not as predicted, to tell
            what the optimizer moves from what nobody predicts.
    """
    step, layouts = built.step, built.layouts
    compiled = step.compile(built.batch)
    moved = check_collectives(step, built.batch, compiles_apart=compiles_apart)
    mesh = layouts.mesh
    return Explanation(
        mesh=str(mesh),
        axes=dict(zip(mesh.axis_names, mesh.shape, strict=True)),
        table=layouts.table,
        bytes_per_device={
            "parameters": layouts.table.bytes_per_device,
            "optimizer": step.optimizer_table.bytes_per_device,
            **({"slow links": step.extra_table.bytes_per_device} if step.extra_table.rows else {}),
            "gradients": layouts.table.bytes_per_device,
            "batch": sum(leaf.size * leaf.dtype.itemsize for leaf in built.batch.values()) // layouts.num_batch_shards,
        },
        compiled=compiled_memory(compiled),
        **moved._asdict(),
        schedule=layouts.pipeline.schedule if layouts.pipeline else None,
        notes=(*([built.re_formed] if built.re_formed else []), *layouts.notes),
    )


def schedule_figures(schedule: Schedule) -> str:
    """Says in a few lines what a schedule costs, in units of a pass."""
    title = f"Pipeline schedule {schedule.name}, {schedule.microbatches:,} microbatches, in units of a pass"
    figures = schedule_command.summary(schedule, measure(schedule)).splitlines()
    return "\n".join([title, *(f"  {line}" for line in figures)])


def compiled_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes that a compiled program needs on one device; the backend's own peak leaves temporaries out on CPU."""
    memory: Any = compiled.memory_analysis()
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
    }
    return {**sizes, "total": sum(sizes.values()) - 2 * sizes["aliased"]}


def _line(collective: Collective) -> dict[str, Any]:
    return {**asdict(collective), "axes": list(collective.axes)}


def _listing(title: str, sizes: dict[str, int]) -> str:
    return "\n".join([title, *(f"  {name:<12} {format_bytes(size):>12}" for name, size in sizes.items())])


def _collectives(explanation: Explanation) -> Iterator[str]:
    """The collectives of the compiled step."""
    exactly = "exactly as predicted" if explanation.predicted == explanation.found else "as predicted"
    yield f"Collectives of the compiled step, {'NOT as predicted' if explanation.unexpected else exactly}"
    for line in explanation.found:
        left = "   left to XLA" if line in explanation.left_to_xla else ""
        left = "   with the model's own" if line in explanation.of_the_model else left
        axes = f"{' x '.join(line.axes):<14}"
        yield f"  {line.kind:<18} over {axes} {line.count:>5,} a step {format_bytes(line.bytes):>12}{left}"
    if not explanation.found:
        yield "  none"
