"""What a step holds and moves, as the report shows it: memory of a device, collectives, the pipeline's schedule."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ...layouts.sizes import counted, format_bytes
from ...parallel.collectives import Collective
from .drawings import axis_label
from .page import visible


class StepCosts(NamedTuple):
    """What one step holds and moves.

    Attributes:
        held: Kind -> bytes that each device holds, such as parameters and batch.
        compiled: Kind -> bytes of the compiled step on one device; "aliased" is the part of the outputs that reuses the
            arguments, "total" the sum.
        predicted: The collectives that the strategies' formulas give.
        found: The collectives of the compiled step.
        notes: Where this program is not the one that other devices would run.
        schedule_svg: The pipeline's schedule as a whole SVG file; "" without a pipeline, or where it is too large.
        schedule_text: Its figures in words; "" without a pipeline.
        measured: Whose -> bytes: the most that were in use at once, where the backend or the system tells.
        unexpected: What of `found` is not as predicted, in words: not what XLA was left to decide. None, as files of
            earlier versions have it: whatever differs.
    """

    held: Mapping[str, int]
    compiled: Mapping[str, int]
    predicted: Sequence[Collective]
    found: Sequence[Collective]
    notes: Sequence[str] = ()
    schedule_svg: str = ""
    schedule_text: str = ""
    measured: Mapping[str, int] = MappingProxyType({})
    unexpected: Sequence[str] | None = None


def costs_sections(costs: StepCosts) -> str:
    """Shows what a step holds and moves.

    Args:
        costs: As `spmdkit explain` finds them.

    Returns:
        HTML.
    """
    return "".join((_memory(costs), _collectives(costs), _schedule(costs)))


def _memory(costs: StepCosts) -> str:
    held, compiled = _amounts(costs.held), _amounts(costs.compiled)
    measured = ", ".join(f"{visible(whose)}: {format_bytes(size)}" for whose, size in costs.measured.items())
    told = f'<h3 class="next">What was measured: the most in use at once</h3><p>{measured}</p>' if measured else ""
    return (
        '<h2>Memory of each device</h2><div class="halves">'
        f'<div class="card"><h3>What it holds</h3>{held}</div>'
        f'<div class="card"><h3>What the compiled step needs, as XLA predicts</h3>{compiled}'
        '<p class="note">total = arguments + outputs + temporaries - aliased: outputs that reuse the arguments count '
        f"once.</p>{told}</div></div>"
    )


def _amounts(sizes: Mapping[str, int]) -> str:
    """Bytes by kind, a bar beside each."""
    most = max(sizes.values(), default=0) or 1
    lines = "".join(
        f'<tr{_css("total", kind == "total")}><th scope="row">{visible(kind)}</th>'
        f'<td class="number">{format_bytes(size)}</td>'
        f'<td class="span"><i class="bar" style="width:{100 * size / most:.1f}%"></i></td></tr>'
        for kind, size in sizes.items()
    )
    return f'<table class="amounts">{lines}</table>'


def _collectives(costs: StepCosts) -> str:
    found, predicted = tuple(costs.found), tuple(costs.predicted)
    same = found == predicted
    if same:
        verdict = '<small class="good">exactly as the strategies predict</small>'
    elif costs.unexpected is not None and not costs.unexpected:
        verdict = '<small class="good">as the strategies predict, beside what is left to XLA</small>'
    else:
        verdict = '<small class="bad">not as the strategies predict</small>'
    tables = _collective_table("" if same else "The compiled step", found, predicted)
    if not same:
        tables += _collective_table("The strategies predict", predicted, found)
    notes = "".join(f'<p class="note">Not as predicted: {visible(line)}</p>' for line in costs.unexpected or ())
    notes += "".join(f'<p class="note">Note: {visible(note)}</p>' for note in costs.notes)
    explained = '<p class="note">The bytes are those of whole values, as each device holds or gets them.</p>'
    explained = explained if found or predicted else ""
    columns = "" if same else ' class="halves"'
    return f"<h2>Collectives of a step {verdict}</h2><div{columns}>{tables}</div>{explained}{notes}"


def _collective_table(title: str, lines: Sequence[Collective], others: Collection[Collective]) -> str:
    """A table of collectives; those that are not among `others` are marked."""
    most = max((line.bytes for line in lines), default=0) or 1
    rows = "".join(
        f'<tr{_css("off", line not in others)}><th scope="row">{visible(line.kind)}</th>'
        f"<td>{' × '.join(map(axis_label, line.axes))}</td>"
        f'<td class="number">{line.count:,}</td><td class="number">{format_bytes(line.bytes)}'
        f'<i class="bar" style="width:{100 * line.bytes / most:.1f}%"></i></td></tr>'
        for line in lines
    )
    head = (
        '<tr><th>kind</th><th>over</th><th class="number">a step</th><th class="number">bytes a step</th></tr>'
        if lines
        else "<tr><td>none: nothing is sent between devices</td></tr>"
    )
    heading = f"<h3>{title}, {counted(sum(line.count for line in lines), 'collective')}</h3>" if title else ""
    return f'<div class="card scroll">{heading}<table class="collectives">{head}{rows}</table></div>'


def _schedule(costs: StepCosts) -> str:
    if costs.schedule_svg:  # a shadow root of its own, so that the styles of picture and page do not mix
        drawn = f'<div class="schedule"><template shadowrootmode="open">{costs.schedule_svg}</template></div>'
    elif costs.schedule_text:
        drawn = f'<div class="card"><pre>{visible(costs.schedule_text)}</pre></div>'
    else:
        return ""
    return f"<h2>Schedule of the pipeline</h2>{drawn}"


def _css(name: str, holds: bool) -> str:
    return f' class="{name}"' if holds else ""
