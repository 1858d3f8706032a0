"""Where the time of a run went, as the report shows it: one bar of all kinds, and a line for each."""

from ..goodput import KINDS, Goodput
from ..quantities import duration
from .page import visible

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


def goodput_section(goodput: Goodput) -> str:
    """Shows where the time of a run went.

    Args:
        goodput: The sums of its ledger.

    Returns:
        HTML.
    """
    shares = [(kind, goodput.seconds[kind], goodput.seconds[kind] / goodput.total) for kind in _kinds(goodput)]
    parts = "".join(
        f'<i class="{visible(kind)}" style="flex-grow:{max(share, 0.0005):.4f}" title="{_named(kind)}"></i>'
        for kind, _, share in shares
    )
    keys = "".join(
        f'<li class="{visible(kind)}"><span>{_named(kind)}</span><b>{100 * share:.1f} %</b>'
        f"<small>{duration(seconds)}</small></li>"
        for kind, seconds, share in shares
    )
    return (
        f"<h2>Where the time went <small>goodput {100 * goodput.share:.1f} % of {duration(goodput.total)}"
        f'{_remarks(goodput)}</small></h2><div class="card goodput"><div class="parts">{parts}</div>'
        f"<ul>{keys}</ul></div>"
    )


def _kinds(goodput: Goodput) -> list[str]:
    """The kinds of a run in the order in which they are shown."""
    return sorted(goodput.seconds, key=lambda kind: KINDS.index(kind) if kind in KINDS else len(KINDS))


def _named(kind: str) -> str:
    return visible(NAMES.get(kind, kind))


def _remarks(goodput: Goodput) -> str:
    starts = f", {goodput.starts} starts" if goodput.starts > 1 else ""
    back = f", {goodput.rollbacks:,} rollback{'s' if goodput.rollbacks > 1 else ''}" if goodput.rollbacks else ""
    return starts + back + (f", {goodput.lost_steps:,} steps computed again" if goodput.lost_steps else "")
