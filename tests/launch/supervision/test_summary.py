import signal
from pathlib import Path

from spmdkit.launch.supervision.blame import Exit
from spmdkit.launch.supervision.processes import Outcome
from spmdkit.launch.supervision.summary import summary

LOGS = Path("runs/a/logs")
GLOO = ["error: This process has lost another one of its run: Gloo all-reduce failed"]


def test_nothing_to_say_of_a_finished_run():
    assert summary(Outcome((Exit(0, 0), Exit(1, 0)), None, ([], [])), LOGS) == []


def test_its_words_come_once_and_then_one_line():
    exits = (Exit(1, 1), Exit(0, -15, stopped=True))
    lines = summary(Outcome(exits, None, ([], ["Traceback (most recent call last):", "E: boom"])), LOGS)
    assert lines == [
        "  Traceback (most recent call last):",
        "  E: boom",
        "rank 1 failed first: exit code 1. Its last lines are above, all of them in runs/a/logs/rank-1.log; "
        "rank 0 killed by SIGTERM (told to end)",
    ]


def test_what_others_lost_is_no_cause_and_the_code_is_said():
    lines = summary(Outcome((Exit(0, 75), Exit(1, -11)), None, (GLOO, [])), LOGS)
    assert lines == [
        "rank 1 failed first: killed by SIGSEGV (exit code 75). It printed nothing; rank 0 exit code 75 "
        "(it lost another)"
    ]


def test_two_of_whom_either_may_be_the_cause_are_both_named():
    said = [
        "error: No progress for more than 6 s (timeouts.step): all ranks wait for their devices, but not in the same "
        "place: rank 0 at step 8, evaluation, for 9 s; rank 1 at step 8, step, for 9 s. See the stacks in their logs."
    ]
    line = summary(Outcome((Exit(1, 75), Exit(0, 75)), None, (said, said)), None)[-1]
    assert line.startswith(
        "ranks 0, 1 may have failed first, which cannot be determined: they wait for each other in different places: "
        "rank 0 at step 8, evaluation, for 9 s; rank 1 at step 8, step, for 9 s (exit code 75). "
    )


def test_a_witness_speaks():
    said = ["error: No progress for more than 3 s (timeouts.step): rank 1 at step 6, data, for 4 s."]
    lines = summary(Outcome((Exit(0, 75), Exit(1, -9, stopped=True)), None, (said, [])), None)
    assert lines == [
        f"  {said[0]}",
        "rank 1 failed first: held the others up, as rank 0 tells (exit code 75). The last lines of rank 0 are above; "
        "rank 0 exit code 75",
    ]


def test_a_silent_death():
    assert summary(Outcome((Exit(0, -9),), None, ([],)), LOGS) == [
        "rank 0 failed first: killed by SIGKILL (exit code 75). It printed nothing"
    ]


def test_others_that_ended_alike_are_named_together():
    def line(number):
        exits = (Exit(0, 2), *(Exit(rank, -15, stopped=True) for rank in range(number, 0, -1)))
        return summary(Outcome(exits, None, (["error: no"],) * (number + 1)), None)[-1].partition("; ")[2]

    assert line(3) == "ranks 1, 2, 3 killed by SIGTERM (told to end)"
    assert line(9) == "9 others killed by SIGTERM (told to end)"


def test_stopped_from_outside():
    outcome = Outcome((Exit(0, -15, stopped=True),), signal.SIGTERM, ([],))
    assert summary(outcome, LOGS) == ["stopped by SIGTERM; the same command goes on"]
