import time

import pytest
from play import play
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks import time_limit
from spmdkit.training.callbacks.time_limit import TimeLimit, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h", 10800), ("90m", 5400), ("2h 30m", 9000), ("1.5 min", 90), ("1d12h", 129600), ("45s", 45)],
)
def test_times(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "3", "3 hours", "h", "-3h", "0s", "3h later"])
def test_what_is_no_time(text):
    with pytest.raises(UserError, match=r"is no time: write '3h'"):
        TimeLimit(after=text)


@pytest.mark.parametrize("try_again", [False, True])
def test_it_ends_when_the_process_is_so_old(try_again, monkeypatch):
    monkeypatch.setattr(time_limit, "process_age", lambda: 59.8)

    class Slow:
        def on_step_begin(self, run):
            if run.step == 4:
                time.sleep(0.3)

    played = play(Slow(), TimeLimit(after="1m", try_again=try_again))
    assert (played.step, list(played.saved)) == (5, [5])
    assert played.ended.end == ("try_again" if try_again else "interrupted")
    assert played.ended.reason == "the time limit of 1m"
