"""What a config can name, and what a function of the user's own may return."""

import time
from dataclasses import fields
from pathlib import Path

import pytest
from spmdkit.configs.config_text import field_help
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks import callback_catalog
from spmdkit.training.callbacks.callback import EVENTS, implements
from spmdkit.training.callbacks.callback_catalog import CALLBACKS, StopFile, TimeLimit, make_callbacks, parse_duration
from spmdkit.training.callbacks.monitoring import EarlyStopping
from support.training import play


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_callback_has_documented_options_and_events(name):
    cls = CALLBACKS[name]
    assert {field.name for field in fields(cls)} == field_help(cls).keys()
    assert "name" not in field_help(cls)
    required = {"after": "1h"} if name == "time_limit" else {}
    assert any(implements(cls(**required), event) for event in EVENTS)


def test_creates_callbacks_of_the_catalog():
    ((name, callback),) = make_callbacks([{"name": "early_stopping", "patience": 7}], {}).items()
    assert (name, callback) == ("callbacks.0 (early_stopping)", EarlyStopping(patience=7))


OWN = """
from spmdkit.training.callbacks.callback import Callback

class Mine:
    def __init__(self, steps): self.steps = steps
    def on_step_begin(self, run): ...

class Wrong:
    def on_epoch_ends(self, run, epoch): ...

def make(num_steps, factor=2): return Mine(num_steps * factor)
def wrong(): return Wrong()
class Few:
    def on_step_end(self, run): ...

class Many:
    def state(self, run): return {}

class Watching(Many):
    monitors = ["eval_loss"]

class Nowhere(Callback):
    writes = "file"
    def on_step_end(self, run, record): ...

class NoMethod:
    on_step_end = 3

def few(): return Few()
def many(): return Many()
def nothing(): return 3
def forgot(): return Mine
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    import sys

    (tmp_path / "own_callbacks.py").write_text(OWN)
    yield lambda **given: make_callbacks([given], {"num_steps": 5, "config": {}}, [tmp_path])
    sys.modules.pop("own_callbacks", None)


def test_creates_the_users_callback(own):
    ((name, callback),) = own(name="own_callbacks:make", factor=3).items()
    assert (name, callback.steps) == ("callbacks.0 (own_callbacks:make)", 15)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"name": "own_callbacks:make", "facto": 3}, "facto is not an option of make. Did you mean factor?"),
        ({"name": "own_callbacks:mak"}, "callbacks.0.name='own_callbacks:mak': .* not define mak. Did you mean make?"),
        ({"name": "own_callbacks:wrong"}, "Wrong.on_epoch_ends is not an event. Did you mean on_epoch_end?"),
        ({"name": "own_callbacks:few"}, r"Few.on_step_end\(run\) cannot be called with \(run, record\). Define it as"),
        ({"name": "own_callbacks:many"}, r"Many.state\(run\) cannot be called with \(\). Define it as state\(self\)"),
        ({"name": "own_callbacks:Watching"}, r"Watching.monitors=\['eval_loss'\] must be the name of a metric"),
        ({"name": "own_callbacks:Nowhere"}, "Nowhere.path=None must be a string, as Nowhere.writes='file' is set"),
        ({"name": "own_callbacks:NoMethod"}, "NoMethod.on_step_end must be a method, got 3"),
        ({"name": "own_callbacks:nothing"}, "returned a int without an event of a callback. Define one of on_"),
        ({"name": "own_callbacks:forgot"}, "returned the class Mine. Return an object of it."),
    ],
)
def test_rejects_invalid_user_callbacks(given, text, own):
    with pytest.raises(UserError, match=text.replace("?", r"\?")):
        own(**given)


def test_stop_file_ends_the_run_once(tmp_path):
    class Touching:
        def on_step_begin(self, run):
            if run.step == 3:
                (run.folder / "stop").touch()

    played = play(Touching(), StopFile(seconds=0), folder=tmp_path)
    assert (played.step, played.ended.end, list(played.saved)) == (4, "interrupted", [4])
    assert played.ended.reason == f"the file {tmp_path}/stop"
    assert not (tmp_path / "stop").exists()
    assert play(StopFile(seconds=0), folder=tmp_path, start=4).step == 12


def test_stop_file_is_checked_at_intervals(tmp_path, monkeypatch):
    exists, checked = Path.exists, []
    monkeypatch.setattr(Path, "exists", lambda path: checked.append(path) or exists(path))
    play(StopFile(seconds=60), folder=tmp_path)
    assert checked.count(tmp_path / "stop") < 12


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h", 10800), ("90m", 5400), ("2h 30m", 9000), ("1.5 min", 90), ("1d12h", 129600), ("45s", 45)],
)
def test_parses_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "3", "3 hours", "h", "-3h", "0s", "3h later"])
def test_rejects_invalid_durations(text):
    with pytest.raises(UserError, match=r"is not a valid duration. Use '3h'"):
        TimeLimit(after=text)


@pytest.mark.parametrize("try_again", [False, True])
def test_time_limit_counts_from_process_start(try_again, monkeypatch):
    monkeypatch.setattr(callback_catalog, "process_age", lambda: 59.8)

    class Slow:
        def on_step_begin(self, run):
            if run.step == 4:
                time.sleep(0.3)

    played = play(Slow(), TimeLimit(after="1m", try_again=try_again))
    assert (played.step, list(played.saved)) == (5, [5])
    assert played.ended.end == ("try_again" if try_again else "interrupted")
    assert played.ended.reason == "the time limit of 1m"
