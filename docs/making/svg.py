"""What all drawings share: the frame, the colors, and an axis in the color of its name."""

from collections.abc import Iterable
from html import escape

from spmdkit.report.drawings import axis_hue

STYLE = """
svg { --back: #ffffff; --ink: #1b2230; --dim: #667085; --line: #d5dae2; --card: #f6f7f9; --all: #b9c1cd; --l: 42%;
  color-scheme: light dark;
  font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --back: #12161d; --ink: #e6e9ef; --dim: #98a2b3; --line: #39424f; --card: #1a202a; --all: #5d6878; --l: 78%; }
}
text { fill: var(--ink); } .dim { fill: var(--dim); font-size: 12px; } .head { font-size: 14px; font-weight: 650; }
.middle { text-anchor: middle; } .code { font: 12.5px ui-monospace, Menlo, Consolas, monospace; }
.axis { fill: oklch(var(--l) 0.13 var(--h)); font-weight: 650; }
.back { fill: var(--back); } .card { fill: var(--card); stroke: var(--line); }
"""


def frame(width: int, height: int, title: str, style: str, parts: Iterable[str]) -> str:
    """Puts parts of a drawing into one SVG, light or dark as its reader's system is.

    Args:
        width: In pixels.
        height: In pixels.
        title: What the drawing shows, for those who cannot see it.
        style: CSS beside the shared one.
        parts: SVG.
    """
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" aria-labelledby="name">',
            f'<title id="name">{escape(title)}</title>',
            f"<style>{STYLE}{style}</style>",
            f'<rect class="back" width="{width}" height="{height}" rx="10"/>',
            *parts,
            "</svg>\n",
        ]
    )


def in_color(axis: str, more: str = "") -> str:
    """The name of a mesh axis, and what follows it, in its color: inside a `text`."""
    return f'<tspan class="axis" style="--h: {axis_hue(axis)}">{axis}{more}</tspan>'
