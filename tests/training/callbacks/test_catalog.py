"""What a config can name, and what a function of the user's own may return."""

from dataclasses import fields

import pytest
from spmdkit.configs.help import field_help
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.callback import EVENTS, hears
from spmdkit.training.callbacks.catalog import CALLBACKS, make_callbacks
from spmdkit.training.callbacks.early_stopping import EarlyStopping


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_one_has_options_with_help_and_does_something(name):
    cls = CALLBACKS[name]
    assert {field.name for field in fields(cls)} == field_help(cls).keys()
    assert "name" not in field_help(cls)
    required = {"after": "1h"} if name == "time_limit" else {}
    assert any(hears(cls(**required), event) for event in EVENTS)


def test_those_of_the_catalogue():
    ((name, callback),) = make_callbacks([{"name": "early_stopping", "patience": 7}], {})
    assert (name, callback) == ("callbacks.0 (early_stopping)", EarlyStopping(patience=7))


OWN = """
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

def few(): return Few()
def many(): return Many()
def nothing(): return 3
def forgot(): return Mine
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    import sys

    (tmp_path / "own_callbacks.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda **given: make_callbacks([given], {"num_steps": 5, "config": {}}, [tmp_path])
    sys.modules.pop("own_callbacks", None)


def test_the_users_own(own):
    ((name, callback),) = own(name="own_callbacks:make", factor=3)
    assert (name, callback.steps) == ("callbacks.0 (own_callbacks:make)", 15)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"name": "own_callbacks:make", "facto": 3}, "facto is not an option. Did you mean callbacks.0.factor?"),
        ({"name": "own_callbacks:mak"}, "callbacks.0.name='own_callbacks:mak': .* holds no mak. Did you mean make?"),
        ({"name": "own_callbacks:wrong"}, "Wrong.on_epoch_ends is not an event. Did you mean on_epoch_end?"),
        ({"name": "own_callbacks:few"}, r"Few.on_step_end\(run\) cannot be called with \(run, record\). Define it as"),
        ({"name": "own_callbacks:many"}, r"Many.state\(run\) cannot be called with \(\). Define it as state\(self\)"),
        ({"name": "own_callbacks:nothing"}, "returned a int that hears of nothing. Give it one of on_train_begin, "),
        ({"name": "own_callbacks:forgot"}, "returned the class Mine. Return an object of it."),
    ],
)
def test_what_is_wrong_with_the_users_own(given, text, own):
    with pytest.raises(UserError, match=text.replace("?", r"\?")):
        own(**given)
