"""A client of JAX's coordination service whose calls end: the service may stand still with process 0, and a call to it
then waits until that process is declared dead."""

import threading
from queue import Empty, SimpleQueue
from typing import Any


class Unanswered(RuntimeError):
    """Process 0, which answers for all, did not answer in time."""


class Answering:
    """The same methods as the client's; each raises `Unanswered` where no answer comes."""

    def __init__(self, client: Any, seconds: float) -> None:
        """Takes a client.

        Args:
            client: Of the coordination service.
            seconds: How long to wait for an answer.
        """
        self._client = client
        self._seconds = seconds
        self._waiting = threading.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if self._waiting.is_set():
                raise Unanswered(f"process 0 has not answered an earlier {name}")
            answer: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()

            def ask() -> None:
                try:
                    answer.put((method(*arguments, **options), None))
                except Exception as error:
                    answer.put((None, error))
                finally:
                    self._waiting.clear()

            self._waiting.set()
            threading.Thread(target=ask, name="ask-process-0", daemon=True).start()
            try:
                value, error = answer.get(timeout=self._seconds)
            except Empty:
                raise Unanswered(f"process 0 did not answer within {self._seconds:.0f} s") from None
            self._waiting.clear()
            if error is not None:
                raise error
            return value

        return call
