"""The time split of a run over its time: how much of each piece of time went where, and events above it."""

from collections.abc import Sequence

from ..goodput import KINDS
from ..quantities import duration
from .charts import MARK_NAMES, Mark, ticks
from .course import Course, Stretch
from .page import visible

BINS = 160
"""Pieces of time that are drawn."""
HEIGHT = 100
"""The drawing's own units, down: shares in percent."""
SHOWN_KINDS = tuple(kind for kind in KINDS if kind != "lost")


def timeline(course: Course) -> str:
    """Draws the time split over the time of a run, with its events.

    Args:
        course: Of the run.

    Returns:
        HTML; "" where less than a moment is known.
    """
    if course.seconds <= 0 or len(course.stretches) < 3:
        return ""
    bins = binned(course.stretches, BINS)
    events = _one_in_a_place(course)
    return (
        f'<div class="timeline"><div class="band"><svg viewBox="0 0 {BINS} {HEIGHT}" preserveAspectRatio="none" '
        f'role="img"><title>Time split over the time of the run</title><desc>{visible(_in_words(course))}</desc>'
        f"{''.join(_area(bins, kind) for kind in SHOWN_KINDS)}{_lines(events)}</svg>{_axis(course.seconds)}</div>"
        f"{_keys(events)}</div>"
    )


def binned(stretches: Sequence[Stretch], count: int) -> list[dict[str, float]]:
    """Divides the time of a run into pieces of one length.

    Args:
        stretches: One after the other, from 0.
        count: Pieces.

    Returns:
        Of each piece kind -> share of it; the shares add up to 1.
    """
    width = stretches[-1].end / count
    bins: list[dict[str, float]] = [{} for _ in range(count)]
    for stretch in stretches:
        first, last = int(stretch.start / width), min(int(stretch.end / width), count - 1)
        for place in range(first, last + 1):
            both = min(stretch.end, (place + 1) * width) - max(stretch.start, place * width)
            part = max(both, 0.0) / width / max(stretch.end - stretch.start, 1e-12)
            for kind, seconds in stretch.seconds.items():
                bins[place][kind] = bins[place].get(kind, 0.0) + part * seconds
    return bins


def _area(bins: Sequence[dict[str, float]], kind: str) -> str:
    """One kind of all pieces, on top of the kinds before it."""
    below = SHOWN_KINDS[: SHOWN_KINDS.index(kind)]
    corners = []
    for place, shares in enumerate(bins):
        tall = HEIGHT * shares.get(kind, 0.0)
        if tall >= 0.1:
            bottom = HEIGHT * (1 - sum(shares.get(other, 0.0) for other in below))
            corners.append(f"M{place} {bottom:.1f}h1v{-tall:.1f}h-1z")
    return f'<path class="{kind}" d="{"".join(corners)}"/>' if corners else ""


def _one_in_a_place(course: Course) -> list[tuple[float, Mark]]:
    """The events with their places, 0 to 1; of several of a kind that would cover each other the last."""
    placed = [(min(at / course.seconds, 1.0), mark) for at, mark in course.events]
    return list({(mark.kind, round(place * BINS)): (place, mark) for place, mark in placed}.values())


def _lines(events: Sequence[tuple[float, Mark]]) -> str:
    return "".join(
        f'<path class="mark {mark.kind}" d="M{place * BINS:.2f} -14V-3"><title>{visible(mark.text)}</title></path>'
        for place, mark in events
    )


def _axis(total: float) -> str:
    return "".join(
        f'<span class="x" style="left:{100 * at / total:.2f}%">{duration(at) if at else "0"}</span>'
        for at in ticks(0, total, count=4)
        if at <= 0.96 * total
    )


def _keys(events: Sequence[tuple[float, Mark]]) -> str:
    there = {mark.kind for _, mark in events}
    keys = " ".join(
        f'<span class="key mark {kind}">{name}</span>' for kind, name in MARK_NAMES.items() if kind in there
    )
    return f'<p class="keys">{keys}</p>' if keys else ""


def _in_words(course: Course) -> str:
    told = [f"{duration(at)}: {mark.text}" for at, mark in course.events[:50]]
    return ". ".join([f"{duration(course.seconds)} in all", *told]) + "."
