"""The function that a thread is in: of the package or of a user, not of Python or a library."""

import threading
import time
from queue import Queue

import pytest
from spmdkit.training.watching.where import where

WAITS = "def waits(queue):\n    queue.get()\n"
"""It stands in functions of Python's own."""


@pytest.mark.parametrize(
    ("name", "shown"),
    [("mine.py", "waits (mine.py)"), (f"{__file__}", "waits (tests/training/watching/test_where.py)")],
    ids=["a user's", "the package's"],
)
def test_a_thread_that_waits_in_a_library(name, shown, tmp_path):
    module: dict = {"__name__": "mine"}
    exec(compile(WAITS, str(tmp_path / name), "exec"), module)
    queue: Queue = Queue()
    thread = threading.Thread(target=module["waits"], args=(queue,))
    thread.start()
    assert thread.ident is not None
    try:
        while where(thread.ident) != shown:
            time.sleep(0.01)
    finally:
        queue.put(None)
        thread.join()
    assert where(thread.ident) == "", "it has ended"
