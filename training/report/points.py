"""The points of a line: read from records, thinned to what a screen shows, smoothed."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..quantities import is_number

MAX_POINTS = 1000
"""Points drawn per line; of more, the lowest and highest of each stretch are kept, so spikes stay."""

Point = tuple[float, float]


def points_of(records: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """Collects a line from the records of metrics.jsonl.

    Args:
        records: In the order of their steps; any key may be missing or not finite.
        key: Of the values.

    Returns:
        (step, value) of the records that have both.
    """
    return [
        (record["step"], record[key])
        for record in records
        if is_number(record.get("step")) and is_number(record.get(key))
    ]


def thinned(points: list[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Leaves out points that a screen cannot show, keeping the lowest and highest of each stretch, first and last.

    Args:
        points: (step, value), steps ascending.
        limit: Most points to keep, at least 4.

    Returns:
        At most `limit` of the points, in order.
    """
    if len(points) <= limit:
        return points
    edges = [round(i * len(points) / (limit // 2 - 1)) for i in range(limit // 2)]
    kept = {points[0], points[-1]}
    for start, stop in pairwise(edges):
        stretch = points[start:stop]
        kept |= {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
    return sorted(kept)


def smoothed(points: list[Point]) -> list[Point]:
    """Averages each point with its neighbours, over a window of a thirtieth of the points."""
    reach = len(points) // 60
    averages = []
    for i, (step, _) in enumerate(points):
        near = min(reach, i, len(points) - 1 - i)  # a symmetric window, so the ends do not lag
        window = points[i - near : i + near + 1]
        averages.append((step, sum(value for _, value in window) / len(window)))
    return averages
