"""The display: live on a terminal, plain lines elsewhere, silent in other processes."""

import io
import re

import pytest
from rich.console import Console
from spmdkit.training import display as display_module
from spmdkit.training.display import Display

SPEED = {"tokens_per_second": 12345.6, "flops_per_second": 3.21e9, "seconds": 0.5}
RECORD = {"step": 40, "loss": 2.34567, "grad_norm": 0.8123, "learning_rate": 1e-3, **SPEED}


@pytest.fixture
def make_console():
    """A function that returns a console and a function that returns its output without escape sequences."""

    def make(terminal: bool, width: int = 200):
        file = io.StringIO()
        options = {"force_terminal": terminal, "width": width, "color_system": None, "_environ": {"TERM": "xterm"}}
        console = Console(file=file, **options)
        return console, lambda: re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())

    return make


def test_plain_lines_contain_metrics_and_time_left(make_console):
    console, text = make_console(terminal=False)
    with Display(300, 0, "quickstart", console) as display:
        display.update(RECORD)
        display.update({"step": 300, "loss": 2.0, "eval_loss": 2.1, "seconds": 0.5})
    assert text().splitlines() == [
        "quickstart",
        "step  40/300  loss 2.3457  grad 0.812  12.3k tokens/s  3.21 GFLOP/s  500 ms/step  2:10 min left",
        "step 300/300  loss 2.0000  eval 2.1000  500 ms/step",
    ]


def test_rows_per_second_replace_tokens(make_console):
    console, text = make_console(terminal=False)
    with Display(300, 0, "quickstart", console) as display:
        display.update(RECORD | {"rows_per_second": 950.0})
    assert "  950 rows/s  3.21 GFLOP/s" in text()
    assert "tokens/s" not in text()


@pytest.mark.parametrize("terminal", [True, False])
def test_escapes_control_characters(make_console, terminal):
    console, text = make_console(terminal)
    with Display(300, 0, "data \x1b]0;title\x07", console) as display:
        display.message("a sample \x1b[31mred\x9b2J\u202e\n\tin two lines")
        panel = render(console, display) if terminal else text()
    assert r"data \x1b]0;title\x07" in panel
    assert "a sample \\x1b[31mred\\x9b2J\\u202e\n" in text()
    assert not {"\x07", "\x9b", "\u202e"} & set(panel + text())


def test_live_panel_contains_metrics(make_console):
    console, text = make_console(terminal=True)
    with Display(300, 0, "quickstart", console) as display:
        assert "compiling" in render(console, display)
        display.update(RECORD | {"eval_loss": 2.5})
        display.update({"step": 50, "loss": 2.2, "seconds": 0.5})
        panel = render(console, display)
        display.message("checkpoint of step 50")
    assert "quickstart" in panel
    assert "50/300 16 %" in panel
    assert "left" in panel
    assert "loss 2.2000  eval 2.5000" in panel, "the last evaluation stays"
    assert "█▁" in panel, "a falling sparkline"
    assert "checkpoint of step 50" in text()


def render(console: Console, display) -> str:
    with console.capture() as captured:
        console.print(display._panel())
    return captured.get()


@pytest.mark.parametrize(("terminal", "width"), [(True, 200), (True, 24), (False, 200)])
def test_ignores_missing_and_unknown_metrics(make_console, terminal, width):
    console, text = make_console(terminal, width)
    with Display(10, 5, "a title that is longer than a narrow terminal", console) as display:
        for record in ({}, {"step": 7}, {"loss": float("nan")}, {"loss": None}, {"surprise": "text"}):
            display.update(record)
        display.message("[bold]as it is[/bold]")
    assert "[bold]as it is[/bold]" in text()
    assert "nan" not in text()


def test_other_processes_print_nothing(make_console, monkeypatch):
    console, text = make_console(terminal=True)
    monkeypatch.setattr(display_module, "is_main_process", lambda: False)
    with Display(10, 0, "rank 1", console) as display:
        display.update(RECORD)
        display.message("hello")
    assert text() == ""


def test_estimates_time_left_from_median_step(make_console):
    console, _ = make_console(terminal=False)
    display = Display(110, 0, "estimate", console)
    assert display.seconds_left() is None
    for step, seconds in ((10, 30.0), (20, 1.0), (30, 1.0)):  # the first one includes a compilation
        display.update({"step": step, "seconds": seconds})
    assert display.seconds_left() == pytest.approx(80, abs=1)
