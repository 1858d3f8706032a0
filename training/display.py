"""The progress of a run: a live panel on a terminal, one line per record elsewhere."""

import time
from collections import deque
from collections.abc import Mapping
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
HISTORY = 40
"""Losses in the small chart, and step times in the estimate of the time left."""


class Display:
    """Shows the progress of one run; a context manager. Ignores unknown and missing metrics."""

    def __init__(self, total_steps: int, start_step: int, title: str, console: Console | None = None) -> None:
        """Prepares a display: live on a terminal, plain lines elsewhere, silent in all processes but the main one.

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
        live = console is not None and console.is_terminal and not console.is_dumb_terminal
        self._live = Live(get_renderable=self._panel, console=console, refresh_per_second=2) if live else None

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
