"""What the model wrote, as the report shows it: the last text, and those before it one under the other."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...layouts.sizes import counted
from ..quantities import is_number
from .page import visible

MAX_SAMPLES = 30
"""Texts shown; of more, some of all stages of the run."""


def samples_section(sample: str | None, samples: Sequence[Mapping[str, Any]] = ()) -> str:
    """Shows what a model wrote.

    Args:
        sample: At its end; None or empty for none.
        samples: On the way: `step` and `text` of each, steps ascending.

    Returns:
        HTML; "" where it wrote nothing.
    """
    texts = [each for each in samples if is_number(each.get("step")) and isinstance(each.get("text"), str)]
    earlier = _some(texts)
    shown = f"<pre>{visible(sample)}</pre>" if sample else ""
    if not shown and earlier:
        last = earlier.pop()
        shown = f"<h3>at step {last['step']:,}</h3><pre>{visible(last['text'])}</pre>"
    if not shown:
        return ""
    return f'<h2>What the model writes</h2><div class="card">{shown}</div>{_earlier(earlier)}'


def _earlier(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return ""
    texts = "".join(f"<h3>at step {each['step']:,}</h3><pre>{visible(each['text'])}</pre>" for each in samples)
    summary = f"{counted(len(samples), 'sample')} on the way there"
    return f'<details class="card samples"><summary>{summary}</summary>{texts}</details>'


def _some(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most so many, evenly chosen, the first and the last among them."""
    if len(samples) <= MAX_SAMPLES:
        return list(samples)
    last = len(samples) - 1
    return [samples[round(place * last / (MAX_SAMPLES - 1))] for place in range(MAX_SAMPLES)]
