"""What the loop reports, and when it waits: around a step that only pretends."""

from types import SimpleNamespace

import numpy as np
import pytest
from spmdkit.training.loop import run_steps
from spmdkit.training.steps import late_log
from spmdkit.training.steps.late_log import RUN_AHEAD
from support.training import PretendStep, first_state


def steps_reported(num_steps: int, **options) -> list[int]:
    reported = []
    options["on_progress"] = lambda progress: reported.append(progress.step)
    run_steps(PretendStep(), first_state(options.get("start", 0)), [{}] * num_steps, **options)
    return reported


@pytest.mark.parametrize(
    ("num_steps", "options", "expected"),
    [
        (25, {"log_every": 10}, [10, 20, 25]),
        (20, {"log_every": 10}, [10, 20]),
        (3, {"log_every": 1}, [1, 2, 3]),
        (0, {"log_every": 1}, []),
        (10, {"log_every": 4, "start": 7}, [8, 12, 16, 17]),
        (12, {"log_every": 5, "pause_at": lambda number: number in (3, 10)}, [3, 5, 10, 12]),
        (2, {"log_every": 1, "pause_at": lambda number: True}, [1, 2]),
    ],
)
def test_logged_steps(num_steps, options, expected):
    assert steps_reported(num_steps, **options) == expected


def test_reports_loss_and_norm_of_logged_steps():
    reported = []
    run_steps(PretendStep(), first_state(), [{}] * 4, log_every=2, on_progress=reported.append)
    assert [(progress.step, progress.loss, progress.grad_norm) for progress in reported] == [(2, 102, 1), (4, 104, 1)]
    assert all(progress.extra == {} for progress in reported)


def test_reads_metrics_late_and_in_order():
    step = PretendStep()
    run_steps(step, first_state(), [{}] * 9, log_every=1)
    assert [number for number, _ in step.awaited] == list(range(1, 10))
    lags = [started - number for number, started in step.awaited]
    assert lags == [RUN_AHEAD] * 7 + [1, 0]  # the last ones when there is nothing left to start


def test_first_step_and_pauses_are_not_timed(monkeypatch):
    clock = [0.0]

    def takes(seconds):
        clock[0] += seconds

    class Compiling(PretendStep):
        def __call__(self, state, batch):
            takes(0.0 if self.started else 1.0)
            return super().__call__(state, batch)

        def _on_wait(self, number):
            takes(0.25)
            super()._on_wait(number)

    reported = []
    monkeypatch.setattr(late_log, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    run_steps(
        Compiling(),
        first_state(6),
        [{}] * 12,
        start=6,
        log_every=5,
        pause_at=lambda number: number in (10, 12),
        on_pause=lambda number, state: takes(8.0) or {},
        after_pause=lambda number, state: takes(8.0),
        on_progress=reported.append,
    )
    assert [(each.step, each.seconds, each.weight_per_second) for each in reported] == [
        (step, 0.25, 40.0) for step in (10, 12, 15, 18)
    ]


ROWS = {"weights": np.ones(16)}
TOKENS = {"weights": np.ones((16, 8))}


@pytest.mark.parametrize(("batch", "rows"), [(ROWS, 64.0), (TOKENS, None), ({}, None)], ids=["rows", "tokens", "none"])
def test_counts_rows_if_each_has_one_weight(batch, rows, monkeypatch):
    """A step takes a quarter of a second; the pretended weight of its batch is 10."""
    clock = [0.0]

    class Timed(PretendStep):
        def _on_wait(self, number):
            clock[0] += 0.25
            super()._on_wait(number)

    reported = []
    monkeypatch.setattr(late_log, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    run_steps(Timed(), first_state(), [batch] * 4, log_every=4, on_progress=reported.append)
    (progress,) = reported
    assert (progress.weight_per_second, progress.rows_per_second) == (40.0, rows)
    assert progress.record().get("rows_per_second") == rows
    assert progress.record()["tokens_per_second"] == 40.0


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (1, [(1, 101, None), (2, 101, 2.0), (3, 103, None), (4, 103, 4.0), (5, 105, None), (6, 106, 6.0)]),
        (10, [(2, 101, 2.0), (4, 103, 4.0), (6, 106, 6.0)]),
    ],
)
def test_evaluation_after_a_skipped_step_keeps_its_step(every, expected):
    step, reported = PretendStep(losses={2: np.nan, 4: np.nan}), []
    run_steps(
        step,
        first_state(),
        [{}] * 6,
        log_every=every,
        on_progress=reported.append,
        pause_at=lambda number: number % 2 == 0,
        on_pause=lambda number, state: {"eval_loss": float(number)},
        most_skipped=1,
    )
    assert [(each.step, each.loss, each.extra.get("eval_loss")) for each in reported] == expected
    assert [each.extra["skipped"] for each in reported if each.step in (2, 4, 6)] == [1.0, 2.0, 2.0]
