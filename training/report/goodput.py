"""Where the time of a run went, as the report shows it: one bar of all kinds, and a line for each."""

from collections.abc import Iterable

from ...mesh.text import counted
from ..goodput import KINDS, Goodput
from ..quantities import duration
from .course import Course
from .page import visible
from .timeline import timeline

NAMES = {
    "step": "steps that count",
    "lost": "steps computed again",
    "data": "waiting for data",
    "evaluation": "evaluations",
    "save": "held up by saves",
    "compile": "compiling",
    "start": "starting",
    "restart": "nothing ran",
}
"""Kind -> what it is called."""


def goodput_section(goodput: Goodput, course: Course | None = None) -> str:
    """Shows where the time of a run went.

    Args:
        goodput: The sums of its ledger.
        course: The same over the time of the run; None shows the sums alone.

    Returns:
        HTML.
    """
    shares = _shares(goodput)
    keys = "".join(
        f'<li class="{visible(kind)}"><span>{_named(kind)}</span><b>{100 * share:.1f} %</b>'
        f"<small>{duration(goodput.seconds[kind])}</small></li>"
        for kind, share in shares.items()
    )
    return (
        f"<h2>Where the time went <small>goodput {100 * goodput.share:.1f} % of {duration(goodput.total)}"
        f'{_remarks(goodput)}</small></h2><div class="card goodput">{goodput_bar(goodput)}'
        f"<ul>{keys}</ul>{timeline(course) if course else ''}</div>"
    )


def goodput_bar(goodput: Goodput) -> str:
    """Draws one bar of all kinds.

    Args:
        goodput: The sums of a ledger.

    Returns:
        HTML, for an element of the class goodput.
    """
    shares = _shares(goodput)
    parts = "".join(
        f'<i class="{visible(kind)}" style="flex-grow:{max(share, 0.0005):.4f}" '
        f'title="{_named(kind)} {100 * share:.1f} %"></i>'
        for kind, share in shares.items()
    )
    words = ", ".join(f"{_named(kind)} {100 * share:.1f} %" for kind, share in shares.items())
    return f'<div class="parts" role="img" aria-label="{words}">{parts}</div>'


def goodput_keys(goodputs: Iterable[Goodput]) -> str:
    """Names the colors of bars.

    Args:
        goodputs: Of all of them.

    Returns:
        HTML, for an element of the class goodput.
    """
    there = {kind for goodput in goodputs for kind in goodput.seconds}
    keys = "".join(f'<li class="{visible(kind)}"><span>{_named(kind)}</span></li>' for kind in _in_order(there))
    return f"<ul>{keys}</ul>"


def _shares(goodput: Goodput) -> dict[str, float]:
    """Kind -> its part of the time of a run, in the order in which they are shown."""
    return {kind: goodput.seconds[kind] / goodput.total for kind in _in_order(goodput.seconds)}


def _in_order(kinds: Iterable[str]) -> list[str]:
    return sorted(kinds, key=lambda kind: (KINDS.index(kind) if kind in KINDS else len(KINDS), kind))


def _named(kind: str) -> str:
    return visible(NAMES.get(kind, kind))


def _remarks(goodput: Goodput) -> str:
    starts = f", {goodput.starts} starts" if goodput.starts > 1 else ""
    back = f", {goodput.rollbacks:,} rollback{'s' if goodput.rollbacks > 1 else ''}" if goodput.rollbacks else ""
    return starts + back + (f", {counted(goodput.lost_steps, 'step')} computed again" if goodput.lost_steps else "")
