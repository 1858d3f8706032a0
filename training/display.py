"""The progress of a run: a live panel on a terminal and in a notebook, one line per record elsewhere."""

import html
import io
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..mesh.errors import printable
from ..mesh.processes import is_main_process
from .quantities import OWN_FIGURES, compact, duration, is_number, loss_text, speed_key, with_unit

BLOCKS = "▁▂▃▄▅▆▇█"
PANEL_WIDTH = 100
"""Columns of the panel in a notebook."""
REFRESH_SECONDS = 0.5
"""The shortest time between two updates of the panel in a notebook."""
HISTORY = 40
"""Losses in the small chart, and step times in the estimate of the time left."""


class Display:
    """Shows the progress of one run; a context manager. Ignores unknown and missing metrics."""

    def __init__(self, total_steps: int, start_step: int, title: str, console: Console | None = None) -> None:
        """Prepares a display: a panel on a terminal or in a notebook, plain lines elsewhere.

        All processes but the main one are silent.

        Args:
            total_steps: Optimizer steps of the whole run.
            start_step: Steps done before this start.
            title: One line that names the run.
            console: The console; None for the standard output.
        """
        console = (console or Console(highlight=False, markup=False, emoji=False)) if is_main_process() else None
        self._console = console
        self._total = total_steps
        self._step = start_step
        self._title = printable(title)
        self._latest: dict[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._step_seconds: deque[float] = deque(maxlen=HISTORY)
        self._updated = time.monotonic()
        self._live = self._make_live(console)

    def _make_live(self, console: Console | None) -> "Live | NotebookPanel | None":
        """Returns the panel that is updated in place, or None if each record is printed as a line."""
        if console is None:
            return None
        if console.is_jupyter:
            return NotebookPanel(self._panel)
        if console.is_terminal and not console.is_dumb_terminal:
            return Live(get_renderable=self._panel, console=console, refresh_per_second=2)
        return None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self.message(self._title)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, record: Mapping[str, Any]) -> None:
        """Shows a logged step.

        Args:
            record: Any of step, loss, eval_loss, grad_norm, learning_rate, tokens_per_second or rows_per_second,
                flops_per_second (of the model, all devices together), seconds (per step), and the model's own metrics.
                The panel keeps the results of an evaluation until the next one.
        """
        finite = {name: value for name, value in record.items() if is_number(value)}
        self._step = int(finite.get("step", self._step))
        self._losses.extend([finite["loss"]] if "loss" in finite else [])
        self._step_seconds.extend([finite["seconds"]] if "seconds" in finite else [])
        self._latest |= finite
        self._updated = time.monotonic()
        if isinstance(self._live, NotebookPanel):
            self._live.refresh()
        if self._live is None:
            width, left = len(str(self._total)), self.seconds_left()
            parts = [f"step {self._step:>{width}}/{self._total}", *_metric_texts(finite)]
            parts += [f"{duration(left)} left"] if left is not None and self._step < self._total else []
            self.message("  ".join(parts))

    def message(self, text: str) -> None:
        """Prints a line that stays, with its control characters escaped."""
        if self._console is not None:
            self._console.print(Text(printable(text)), soft_wrap=True)

    def seconds_left(self) -> float | None:
        """Estimates the seconds until the last step from the median of recent steps; None before the first record."""
        if not self._step_seconds:
            return None
        since = time.monotonic() - self._updated
        return max(0.0, (self._total - self._step) * median(self._step_seconds) - since)

    def _panel(self) -> RenderableType:
        left = self.seconds_left()
        position = f"{self._step}/{self._total} {100 * self._step // max(1, self._total)} %"
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column()
        bar.add_column(justify="right", no_wrap=True)
        position += f" {duration(left)} left" if left is not None else ""
        bar.add_row(ProgressBar(self._total, self._step), Text(position))
        numbers = Text("  ".join(_metric_texts(self._latest)) or "compiling the step ...", overflow="fold")
        if len(self._losses) > 1:
            numbers.append(f"  {sparkline(list(self._losses))}", style="cyan")
        return Group(Text(self._title, style="bold", overflow="ellipsis", no_wrap=True), bar, numbers)


class NotebookPanel:
    """A panel in the output of a notebook's cell, updated in place.

    Rich needs ipywidgets for that; a display handle of IPython does not.
    """

    def __init__(self, render: Callable[[], RenderableType]) -> None:
        """Prepares a panel.

        Args:
            render: Returns the panel's current content.
        """
        self._render = render
        self._handle: Any = None
        self._shown = 0.0

    def start(self) -> None:
        """Shows the panel."""
        from IPython.display import display

        self._handle = display(self._content(), raw=True, display_id=True)
        self._shown = time.monotonic()

    def refresh(self) -> None:
        """Updates the panel, unless it was updated a moment ago."""
        if time.monotonic() - self._shown >= REFRESH_SECONDS:
            self._update()

    def stop(self) -> None:
        """Updates the panel for the last time."""
        self._update()

    def _update(self) -> None:
        self._handle.update(self._content(), raw=True)
        self._shown = time.monotonic()

    def _content(self) -> dict[str, str]:
        """Returns the panel by MIME type."""
        output = io.StringIO()
        console = Console(file=output, width=PANEL_WIDTH, force_jupyter=False, color_system=None)
        console.print(self._render())
        text = output.getvalue()
        return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}


def sparkline(values: list[float]) -> str:
    """Draws finite numbers as a row of blocks, from lowest to highest; at least one number."""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)


def _metric_texts(record: Mapping[str, float]) -> list[str]:
    """Formats the metrics of a record in a fixed order; the model's own come after the losses."""
    speed = speed_key([record])
    formats = {
        "loss": lambda value: f"loss {loss_text(value)}",
        "eval_loss": lambda value: f"eval {loss_text(value)}",
        **{name: lambda value, name=name: f"{name} {value:.4g}" for name in record if name not in OWN_FIGURES},
        "grad_norm": lambda value: f"grad {value:.3g}",
        speed: lambda value: f"{compact(value)} {speed.split('_')[0]}/s",
        "flops_per_second": lambda value: with_unit(value, "FLOP/s"),
        "seconds": lambda value: f"{duration(value)}/step",
    }
    return [write(record[name]) for name, write in formats.items() if name in record]
