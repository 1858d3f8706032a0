"""Who holds a run up: the one behind, the one that does not answer, or the one that is elsewhere in the same phase."""

import pytest
from spmdkit.runtime.guards.progress_notes import Note, verdict

AHEAD, WAITS, EVALUATES = Note(7, "step", 40), Note(7, "data", 41), Note(6, "evaluation", 42)
READS = Note(6, "evaluation", 9, 2, "take (mine.py)")
MEASURES = Note(6, "evaluation", 9, 2, "measure (training/loop.py)")
DRAINS = Note(8, "step", 9, 0, "_wait_for_oldest (training/steps/late_log.py)")
PAST_IT = Note(8, "evaluation", 9, 2, "measure (parallel/step/train_step.py)")
LATER = Note(6, "evaluation", 8, 4, "measure (training/loop.py)")


@pytest.mark.parametrize(
    ("notes", "silent", "says"),
    [
        ([AHEAD], [], "30 s (timeouts.step): step 7, step, for 40 s. The stacks"),
        ([AHEAD, WAITS], [], "rank 1 at step 7, data, for 41 s. Rank 0 waits at step 7, step, for 40 s."),
        ([AHEAD, WAITS, AHEAD, AHEAD], [], "rank 1 at step 7, data, for 41 s. Ranks 0, 2 and 3 wait at step 7, step"),
        ([EVALUATES, AHEAD], [], "rank 0 at step 6, evaluation, for 42 s. Rank 1 waits at"),
        ([Note(6, "step", 9), EVALUATES], [], "rank 0 at step 6, step, for 9 s. Rank 1 waits at step 6, evaluation"),
        ([AHEAD, AHEAD], [], "all ranks are at step 7, step, for 40 s: see the stacks in their logs"),
        ([AHEAD, AHEAD], [1], "rank 1 at step 7, step, for 40 s, no longer answers: stopped, frozen, dead,"),
        ([AHEAD, AHEAD], [1], "cut off from the network, or Python's lock is held there. Rank 0 waits"),
        ([AHEAD, None, None], [1, 2], "ranks 1 and 2 before its first step, no longer answer:"),
        ([EVALUATES, None], [], "rank 0 at step 6, evaluation, for 42 s. Rank 1 waits before the first step."),
    ],
)
def test_who_holds_it_up(notes, silent, says):
    assert says in verdict(notes, silent, 30)


@pytest.mark.parametrize(
    ("notes", "says"),
    [
        (
            [LATER, READS],
            "rank 1 at step 6, evaluation after 2 batches, for 9 s, in take (mine.py). Rank 0 waits at step 6, "
            "evaluation after 4 batches, for 8 s, in measure (training/loop.py).",
        ),
        (
            [MEASURES, READS],
            "all ranks are at step 6, evaluation after 2 batches, for 9 s, but not in the same place: rank 0, in "
            "measure (training/loop.py); rank 1, in take (mine.py). See the stacks",
        ),
        (
            [MEASURES, MEASURES, READS],
            "rank 2 at step 6, evaluation after 2 batches, for 9 s, in take (mine.py). Ranks 0 and 1 wait at step 6",
        ),
        ([MEASURES, MEASURES, READS, READS], "place: ranks 0 and 1, in measure (training/loop.py); ranks 2 and 3, in"),
        ([MEASURES, MEASURES], "for 9 s, in measure (training/loop.py): see the stacks in their logs"),
        (  # one is ahead because it has left a collective out, or the other one hangs: nobody can tell
            [PAST_IT, DRAINS],
            "ranks wait for their devices, but not in the same place: rank 0 at step 8, evaluation after 2 batches, "
            "for 9 s, in measure (parallel/step/train_step.py); rank 1 at step 8, step, for 9 s, in _wait_for_oldest",
        ),
        ([PAST_IT, DRAINS, DRAINS, DRAINS], "(timeouts.step): rank 0 at step 8, evaluation after 2 batches"),
        ([PAST_IT, DRAINS, DRAINS, DRAINS], "Ranks 1 to 3 wait at step 8, step"),
        ([PAST_IT, DRAINS._replace(at="write (mine.py)")], "rank 1 at step 8, step, for 9 s, in write (mine.py)."),
    ],
)
def test_in_one_phase_they_are_told_apart(notes, says):
    assert says in verdict(notes, [], 30)


SLEEPS = Note(8, "step", 9, 0, "on_step (mine.py)", is_free=True)


@pytest.mark.parametrize(
    ("notes", "says"),
    [
        ([DRAINS, SLEEPS], "rank 1 at step 8, step, for 9 s, in on_step (mine.py). Rank 0 waits at step 8, step"),
        ([SLEEPS, DRAINS, SLEEPS], "ranks 0 and 2 at step 8, step, for 9 s, in on_step (mine.py). Rank 1 waits"),
        ([DRAINS, SLEEPS._replace(is_free=False)], "but not in the same place: rank 0, in _wait_for_oldest"),
        ([SLEEPS, SLEEPS], "all ranks are at step 8, step, for 9 s, in on_step (mine.py): see the stacks"),
    ],
)
def test_user_code_with_idle_devices_holds_up_the_library(notes, says):
    assert says in verdict(notes, [], 30)


def test_the_network_is_named_if_all_are_in_one_place():
    assert "the network between two of them loses messages, or a device hangs." in verdict([DRAINS, DRAINS], [], 30)


def test_the_key_of_the_deadline_is_named():
    said = verdict([Note(6, "save", 9)], [], 8, "timeouts.save")
    assert said.startswith("No progress for more than 8 s (timeouts.save): step 6, save, for 9 s.")
