"""A run that died starts again while it makes progress, and so many times without; a mistake or a signal ends it."""

import signal

import pytest
from spmdkit.launch.supervision.blame import Exit
from spmdkit.launch.supervision.processes import Outcome
from spmdkit.launch.supervision.restarts import Restarts, newest_step


def ended(code, received=None):
    return Outcome((Exit(0, code),), received, ([],))


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_only_what_may_end_otherwise_is_tried_again(code, tmp_path):
    assert Restarts(tmp_path, 3).after(ended(code)) == (False, 0, "")


def test_a_signal_to_the_launcher_ends_it(tmp_path):
    assert not Restarts(tmp_path, 3).after(ended(75, signal.SIGTERM)).again


@pytest.mark.parametrize("code", [75, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV])
def test_the_dead_are_started_again_from_the_newest_checkpoint(code, tmp_path):
    tries = Restarts(tmp_path / "checkpoints", 2)
    assert tries.after(ended(code)).reason.startswith("starting again in 1 s from the beginning, restart 1 of 2")
    for step in (5, 10, 15):  # as often as it gets further
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        assert tries.after(ended(code)) == (True, 0, f"starting again from step {step}")


def test_a_run_that_gets_nowhere_ends(tmp_path):
    (tmp_path / "8").mkdir()
    tries = Restarts(tmp_path, 3)
    assert [tries.after(ended(75))[:2] for _ in range(4)] == [(True, 1), (True, 2), (True, 4), (False, 0)]
    assert Restarts(tmp_path, 0).after(ended(75)) == (False, 0, "")
    many = Restarts(tmp_path, 20)
    assert max(many.after(ended(75)).seconds for _ in range(20)) == 60


def test_what_is_no_checkpoint_does_not_count(tmp_path):
    for name in ("7", "damaged-9", "removed-8", "12.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
    assert newest_step(tmp_path) == 7
    assert newest_step(tmp_path / "none") == 0


def test_progress_after_a_damaged_checkpoint_was_set_aside_counts(tmp_path):
    (tmp_path / "999").mkdir()
    (tmp_path / "20").mkdir()
    tries = Restarts(tmp_path, 1)
    (tmp_path / "999").rename(tmp_path / "damaged-999")
    assert tries.after(ended(75)) == (
        True,
        1,
        "starting again in 1 s from step 20, restart 1 of 1 without a newer checkpoint",
    )
    (tmp_path / "40").mkdir()
    assert tries.after(ended(75)) == (True, 0, "starting again from step 40")
