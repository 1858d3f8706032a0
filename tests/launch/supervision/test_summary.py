import signal
from pathlib import Path

from spmdkit.launch.supervision.processes import Exit, Outcome
from spmdkit.launch.supervision.summary import ending, summary

LOGS = Path("runs/a/logs")


def test_nothing_to_say_of_a_finished_run():
    assert summary(Outcome((Exit(0, 0), Exit(1, 0)), None, ([], [])), LOGS) == []


def test_names_the_rank_its_end_and_its_words():
    exits = (Exit(1, 1), Exit(0, -15, stopped=True))
    lines = summary(Outcome(exits, None, ([], ["Traceback (most recent call last):", "E: boom"])), LOGS)
    assert lines == [
        "rank 1 failed first: exit code 1. Its last lines, all of them in runs/a/logs/rank-1.log:",
        "  Traceback (most recent call last):",
        "  E: boom",
        "the others: rank 0 killed by SIGTERM",
    ]


def test_a_silent_death():
    lines = summary(Outcome((Exit(0, -9),), None, ([],)), LOGS)
    assert lines[0].startswith("rank 0 failed first: killed by SIGKILL.")
    assert lines[1:] == ["  (it printed nothing)"]


def test_stopped_from_outside():
    outcome = Outcome((Exit(0, -15, stopped=True),), signal.SIGTERM, ([],))
    assert summary(outcome, LOGS) == ["stopped by SIGTERM; the same command goes on"]


def test_endings():
    assert [ending(code) for code in (0, 3, -9, -250)] == [
        "finished", "exit code 3", "killed by SIGKILL", "killed by signal 250",
    ]  # fmt: skip
