import signal
from pathlib import Path

from spmdkit.launch.supervision.blame import Exit
from spmdkit.launch.supervision.processes import Outcome
from spmdkit.launch.supervision.summary import summary

LOGS = Path("runs/a/logs")
GLOO = ["error: This process has lost another one of its run: Gloo all-reduce failed"]


def test_nothing_to_say_of_a_finished_run():
    assert summary(Outcome((Exit(0, 0), Exit(1, 0)), None, ([], [])), LOGS) == []


def test_names_the_rank_its_end_and_its_words_last():
    exits = (Exit(1, 1), Exit(0, -15, stopped=True))
    lines = summary(Outcome(exits, None, ([], ["Traceback (most recent call last):", "E: boom"])), LOGS)
    assert lines == [
        "the others: rank 0 killed by SIGTERM (told to end)",
        "rank 1 failed first: exit code 1. Its last lines, all of them in runs/a/logs/rank-1.log:",
        "  Traceback (most recent call last):",
        "  E: boom",
    ]


def test_what_others_lost_is_no_cause_and_the_code_is_said():
    lines = summary(Outcome((Exit(0, 75), Exit(1, -11)), None, (GLOO, [])), LOGS)
    assert lines == [
        "the others: rank 0 exit code 75 (it lost another)",
        "rank 1 failed first: killed by SIGSEGV (exit code 75). Its last lines, all of them in runs/a/logs/rank-1.log:",
        "  (it printed nothing)",
    ]


def test_a_witness_speaks():
    said = ["error: No progress for more than 3 s (timeouts.step): rank 1 at step 6, data, for 4 s."]
    lines = summary(Outcome((Exit(0, 75), Exit(1, -9, stopped=True)), None, (said, [])), None)
    assert lines == [
        "the others: rank 0 exit code 75",
        "rank 1 failed first: held the others up, as rank 0 tells (exit code 75). The last lines of rank 0:",
        f"  {said[0]}",
    ]


def test_a_silent_death():
    lines = summary(Outcome((Exit(0, -9),), None, ([],)), LOGS)
    assert lines[0].startswith("rank 0 failed first: killed by SIGKILL (exit code 75).")
    assert lines[1:] == ["  (it printed nothing)"]


def test_stopped_from_outside():
    outcome = Outcome((Exit(0, -15, stopped=True),), signal.SIGTERM, ([],))
    assert summary(outcome, LOGS) == ["stopped by SIGTERM; the same command goes on"]
