"""Errors of the user's own functions are told with the file and the line that they come from."""

import inspect
import re
import signal
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spmdkit.mesh import DeviceMesh, UserError
from spmdkit.mesh.errors import SITE, docs_url
from spmdkit.parallel.model.user_errors import (
    accepts,
    as_user_error,
    describe_error,
    locate_error,
    locate_function,
    user_items,
)


class OwnError(UserError):
    """A class of its own."""


def told(function, *arguments, **options):
    with pytest.raises(UserError) as caught, as_user_error("mine", function, **options):
        function(*arguments)
    return caught.value


def start_of(function):
    return inspect.getsourcelines(function)[1]


def test_the_innermost_line_of_the_users_own():
    """Whatever of a package it calls raises in the end."""

    def outer():
        return inner()

    def inner():
        return np.reshape(np.zeros(3), (2, 2))

    error = told(outer)
    code = "return np.reshape(np.zeros(3), (2, 2))"
    text = "ValueError: cannot reshape array of size 3 into shape (2,2)"
    assert str(error) == f"mine fails in {__file__}, line {start_of(inner) + 1} ({code}): {text}"
    assert isinstance(error.__cause__, ValueError)


def test_an_error_without_a_line_of_the_users():
    def takes_one(x):
        return x

    place = f"in {__file__}, line {start_of(takes_one)}"
    assert locate_error(TypeError("as raised by a call"), takes_one) == place
    assert locate_function(partial(takes_one, 3)) == place
    assert locate_function(len) == "in len"


def test_what_spmdkit_says_of_the_users_call_gets_its_line():
    def mine():
        return DeviceMesh((2,), ("data",), ["cpu:0"])

    error = told(mine)
    assert str(error).startswith(f"mine fails in {__file__}, line {start_of(mine) + 1} (return DeviceMesh(")
    assert type(error) is UserError


class Countdown:
    """An iterator of the user's own, which ends as Python's iterators do."""

    def __init__(self, items):
        self.items = iter(items)

    def __iter__(self):
        return self

    def __next__(self):
        return self._fetch()

    def _fetch(self):
        return next(self.items)


LOADER = """
class Loader:
    def __init__(self, dataset, fails_in_worker=False):
        self.dataset, self.number, self.fails_in_worker = dataset, -1, fails_in_worker

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.fails_in_worker and self.number:
            reraise(StopIteration("Caught StopIteration in worker process 0"))
        if self.number == len(self.dataset):
            self.end()
        return self.dataset[self.number]

    def end(self):
        raise StopIteration

def reraise(error):
    raise error
"""
LIBRARY: dict[str, Any] = {}
"""A library with an iterator that reads a dataset, as PyTorch's DataLoader does."""
exec(compile(LOADER, "/python/site-packages/loader.py", "exec"), LIBRARY)


def read_on(_):
    return next(iter(()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: [1, 2],
        lambda: iter([1, 2]),
        lambda: (number for number in (1, 2)),
        lambda: map(abs, [1, 2]),
        lambda: Countdown([1, 2]),
        lambda: map(abs, Countdown([1, 2])),
        lambda: LIBRARY["Loader"]([1, 2]),
    ],
)
def test_items_of_the_users_own_end_as_in_a_loop(make):
    assert list(user_items("reading", make)) == [1, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: map(read_on, [1, 2]),
        lambda: filter(read_on, [1, 2]),
        lambda: LIBRARY["Loader"](Stopping()),
        lambda: LIBRARY["Loader"](range(2), fails_in_worker=True),
    ],
)
def test_a_StopIteration_of_code_that_an_iterator_calls_is_no_end(make):
    with pytest.raises(UserError, match=r"reading fails in .*StopIteration"):
        list(user_items("reading", make))


class Stopping:
    """A dataset with a bare `next` of an iterator that has ended."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index if index == 0 else next(iter(()))


def test_errors_of_classes_of_their_own_pass():
    def mine():
        raise OwnError("all said")

    assert str(told(mine)) == "all said"
    assert isinstance(told(lambda: 1 / 0, error_class=OwnError), OwnError)
    with pytest.raises(ZeroDivisionError), as_user_error("mine", passes=lambda error: True):
        1 / 0  # noqa: B018


def test_a_line_of_a_package_is_named_without_the_environment(tmp_path):
    """Where no line of the user's own is among the frames."""
    file = tmp_path / "site-packages" / "other" / "layers.py"
    places = {"__name__": "other.layers"}
    exec(compile("def called():\n    raise ValueError('\\x1b[1mno\\x1b[0m')\n", file, "exec"), places)
    with pytest.raises(ValueError) as caught:
        places["called"]()
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert locate_error(caught.value) == "in other/layers.py, line 2"
    assert describe_error(caught.value) == "ValueError: no"


@pytest.mark.parametrize(
    ("function", "numbers"),
    [(lambda: 0, {0}), (lambda a, b=1: 0, {1, 2}), (lambda *a: 0, {0, 1, 2, 3}), (lambda a, *, b: 0, set())],
)
def test_how_many_arguments_a_function_takes(function, numbers):
    assert {number for number in range(4) if accepts(function, number)} == numbers


HANDLER = """
def handler(number, frame):
    fails()
"""


@pytest.mark.parametrize(
    ("file", "passes"), [("torch/utils/data/_utils/signal_handling.py", True), ("mine/handling.py", False)]
)
def test_what_a_loaders_signal_handler_raises_is_no_error_of_the_users(tmp_path, file, passes):
    """PyTorch's handler is a function of this name in this file, around one in C that raises."""

    def fails():
        raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed.")

    def users():
        signal.raise_signal(signal.SIGUSR1)

    places = {"fails": fails}
    exec(compile(HANDLER, tmp_path / file, "exec"), places)
    before = signal.signal(signal.SIGUSR1, places["handler"])
    try:
        with pytest.raises(RuntimeError if passes else UserError) as caught, as_user_error("mine"):
            users()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert type(caught.value) is (RuntimeError if passes else UserError)


def test_messages_lead_to_pages_that_exist():
    """The pages that `docs_url` is called with, and the one place that has the URL of the site."""
    root = Path(__file__).resolve().parents[3]
    packages = [path.parent.name for path in root.glob("*/__init__.py")]
    sources = {path: path.read_text(encoding="utf-8") for folder in packages for path in (root / folder).rglob("*.py")}
    asked = [match for text in sources.values() for match in re.findall(r"docs_url\(['\"](.+?)['\"]", text)]
    assert len(asked) >= 3
    assert [page for page in asked if not (root / "docs" / f"{page}.md").is_file()] == []
    assert [path.name for path, text in sources.items() if "github.io" in text] == ["errors.py"]
    named_by_path = r"[\"'][^\"'\n]*\bdocs/[\w-]+\.md[^\"'\n]*[\"']"
    assert [path.name for path, text in sources.items() if re.search(named_by_path, text)] == []


def test_the_url_of_a_page():
    assert docs_url("models", "randomness") == "https://spmdkit.github.io/spmdkit/models.html#randomness"
    root = Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Documentation"] == SITE
    assert f"site_url: {SITE}\n" in (root / "mkdocs.yml").read_text(encoding="utf-8")
    assert {"Repository", "Issues", "Changelog"} <= set(project["urls"])
