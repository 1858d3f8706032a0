"""Who holds a run up: the one behind, or the one that does not answer; and what counts as progress."""

import subprocess
import sys
import time

import pytest
from spmdkit.training.times import Times
from spmdkit.training.watching.watchdog import Note, Watchdog, _Deadlines, verdict

AHEAD, WAITS, EVALUATES = Note(7, "step", 40), Note(7, "data", 41), Note(6, "evaluation", 42)


@pytest.mark.parametrize(
    ("notes", "silent", "says"),
    [
        ([AHEAD], [], "30 s (timeouts.step): step 7, step, for 40 s. The stacks"),
        ([AHEAD, WAITS], [], "rank 1 at step 7, data, for 41 s. Rank 0 waits at step 7, step, for 40 s."),
        ([AHEAD, WAITS, AHEAD, AHEAD], [], "rank 1 at step 7, data, for 41 s. Ranks 0, 2 and 3 wait at step 7, step"),
        ([EVALUATES, AHEAD], [], "rank 0 at step 6, evaluation, for 42 s. Rank 1 waits at"),
        ([Note(6, "step", 9), EVALUATES], [], "rank 0 at step 6, step, for 9 s. Rank 1 waits at step 6, evaluation"),
        ([AHEAD, AHEAD], [], "all ranks are at step 7, step, for 40 s: see the stacks in their logs"),
        ([AHEAD, AHEAD], [1], "rank 1 at step 7, step, for 40 s, no longer answers: stopped, dead, or Python's lock"),
        ([AHEAD, None, None], [1, 2], "ranks 1 and 2 before its first step, no longer answer:"),
    ],
)
def test_who_holds_it_up(notes, silent, says):
    assert says in verdict(notes, silent, 30)


def test_the_key_of_the_deadline_is_named():
    said = verdict([Note(6, "save", 9)], [], 8, "timeouts.save")
    assert said.startswith("No progress for more than 8 s (timeouts.save): step 6, save, for 9 s.")


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        (Note(5, "data", 0), (60, "timeouts.first_step")),
        (Note(5, "step", 0), (60, "timeouts.first_step")),
        (Note(6, "data", 0), (10, "timeouts.step")),
        (Note(5, "save", 0), (30, "timeouts.save")),
        (Note(5, "evaluation", 0), (10, "timeouts.step")),
    ],
)
def test_each_phase_has_its_deadline(note, expected):
    deadlines = _Deadlines(10, {"first_step": 60, "save": 30, "evaluation": 0})
    deadlines.first = 5
    assert deadlines.of(note) == expected
    seconds = expected[0]
    assert [deadlines.passed(note._replace(seconds=each)) for each in (seconds - 1, seconds + 1)] == [False, True]


def test_who_waits_for_a_slow_save_does_not_end_the_run():
    deadlines = _Deadlines(10, {"save": 30})
    waiting = Note(7, "step", 11)
    assert deadlines.may_go_on(Note(6, "save", 20), waiting)
    assert not deadlines.may_go_on(Note(6, "save", 31), waiting)
    assert not deadlines.may_go_on(Note(6, "step", 5), waiting), "no longer deadline than its own"
    assert not _Deadlines(0, {}).passed(Note(1, "step", 10**6)), "0 = for ever"


def test_phases_are_counted():
    times = Times("start")
    watchdog = Watchdog(0, times=times)
    for _ in watchdog.batches(range(1), 0):
        with watchdog.phase(1, "save"):
            time.sleep(0.02)
    found = times.take()
    assert found.keys() == {"start", "data", "step", "save"}
    assert found["save"] >= 0.02


def test_what_is_under_way_is_noted():
    watchdog, seen = Watchdog(0), []

    def doing():
        now = watchdog._now()
        return now and now[:2]

    def batches():
        for number in range(2):
            seen.append(doing())
            yield number

    for number in watchdog.batches(batches(), 4):
        seen.append(doing())
        if number == 1:
            with watchdog.phase(6, "save"):
                seen.append(doing())
    assert seen == [(5, "data"), (5, "step"), (6, "data"), (6, "step"), (6, "save")]
    watchdog.rest()
    assert doing() is None


def test_every_item_is_progress():
    watchdog = Watchdog(0)
    watchdog.note(3, "evaluation")
    for _ in watchdog.goes_on(range(2)):
        assert watchdog._now().seconds < 0.04
        time.sleep(0.05)
    assert watchdog._now()[:2] == (3, "evaluation")


HANGS = """
import time
from spmdkit.training.watching.watchdog import Watchdog
watchdog = Watchdog(1)
with watchdog.watching():
    watchdog.note(3, "step")
    time.sleep(1.5 if {ends} else 60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_a_process_alone_ends_with_its_stacks(ends):
    before = time.monotonic()
    program = [sys.executable, "-c", HANGS.format(ends=ends).replace("1.5", "0.2")]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert ended.returncode == (0 if ends else 75)
    if ends:
        return
    assert time.monotonic() - before < 30
    assert "--- stacks of rank 0" in ended.stderr
    assert 'File "<string>", line 7 in <module>' in ended.stderr
    assert "error: No progress for more than 1 s (timeouts.step): step 3, step, for" in ended.stderr
