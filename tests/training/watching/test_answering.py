import threading
import time

import pytest
from spmdkit.training.watching.answering import Answering, Unanswered


class Client:
    """A service that stands still until it is let go."""

    def __init__(self):
        self.goes_on = threading.Event()

    def get(self, key, *, suffix=""):
        self.goes_on.wait(30)
        return key + suffix

    def fails(self):
        raise KeyError("gone")


def test_answers_and_errors_are_the_clients_own():
    client = Client()
    client.goes_on.set()
    answering = Answering(client, 10)
    assert [answering.get("a", suffix=str(number)) for number in range(3)] == ["a0", "a1", "a2"]
    with pytest.raises(KeyError, match="gone"):
        answering.fails()
    with pytest.raises(AttributeError):
        _ = answering.nothing


def test_a_service_that_stands_still_and_goes_on():
    client = Client()
    answering = Answering(client, 0.2)
    with pytest.raises(Unanswered, match="process 0 did not answer"):
        answering.get("a")
    begin = time.monotonic()
    with pytest.raises(Unanswered, match="an earlier"):
        answering.get("a")
    assert time.monotonic() - begin < 0.15, "not asked again while it has not answered"
    client.goes_on.set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert answering.get("b") == "b"
            return
        except Unanswered:
            time.sleep(0.01)
    raise AssertionError("it did not answer again")
