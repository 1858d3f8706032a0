"""What the processes of a run tell each other besides their arrays: short texts, over JAX's coordination service.

The service runs in process 0 and answers while devices are busy or stuck, so that what is said here does not depend on
collectives. A text that every process gives and reads costs a few milliseconds.
"""

import time
from collections.abc import Callable, Sequence

import jax

from .compat import coordination_client

PREFIX = "spmdkit/"
POLL_SECONDS = 0.05
SAY_SECONDS = 10.0


class ProcessesMissing(RuntimeError):
    """Some processes did not answer in time; the same command may work when they do."""

    exit_code = 75


def exchange(name: str, text: str, *, seconds: float, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Gives a text to all processes of the run, and waits for theirs.

    Args:
        name: What it is; every process gives one text of this name, once.
        text: This process's.
        seconds: How long to wait for the others.
        say: Gets a line now and then that says which processes are missing.

    Returns:
        The texts by rank; of a run of one process its own alone.

    Raises:
        ProcessesMissing: Some gave none in time; they are named.
    """
    client = coordination_client()
    if client is None:
        return [text]
    folder = f"{PREFIX}{name}/"
    client.key_value_set(f"{folder}{jax.process_index()}", text)
    begin = time.monotonic()
    told = begin
    while True:
        found = {int(key.rpartition("/")[2]): value for key, value in client.key_value_dir_get(folder)}
        missing = [rank for rank in range(jax.process_count()) if rank not in found]
        if not missing:
            return [found[rank] for rank in range(jax.process_count())]
        now = time.monotonic()
        if now - begin > seconds:
            raise ProcessesMissing(
                f"{ranks(missing)} did not come to '{name}' within {seconds:.0f} s (timeouts.rendezvous); "
                f"{len(found)} of {jax.process_count()} processes did. Look into their logs."
            )
        if now - told > SAY_SECONDS:
            say(f"waiting for {ranks(missing)} at '{name}' ({now - begin:.0f} s)")
            told = now
        time.sleep(POLL_SECONDS)


def wait_for_all(name: str, *, seconds: float, say: Callable[[str], None] = lambda line: None) -> None:
    """Waits until every process of the run has come here; in a run of one does nothing.

    Unlike a barrier that is a collective, it may take long: Gloo gives up 30 seconds after the first process has come.

    Args:
        name: Where; every process comes there once.
        seconds: How long to wait for the others.
        say: Gets a line now and then that says which processes are missing.

    Raises:
        ProcessesMissing: Some did not come in time; they are named.
    """
    exchange(name, "", seconds=seconds, say=say)


def told_by_first(name: str, text: str, *, seconds: float) -> str:
    """Gives the text of process 0 to all processes; of a run of one process its own.

    Process 0 waits for nobody. Every process calls this as often, and in the same order.

    Args:
        name: What it is; used once.
        text: That of process 0 counts.
        seconds: How long the others wait for it.

    Raises:
        ProcessesMissing: Process 0 did not come in time.
    """
    client = coordination_client()
    if client is None:
        return text
    key = f"{PREFIX}{name}"
    if jax.process_index() == 0:
        client.key_value_set(key, text)
        return text
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:  # in short waits, between which Python hears of signals
            return client.blocking_key_value_get(key, max(1, int(1000 * min(left, 1.0))))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if left <= 0:
                raise ProcessesMissing(
                    f"rank 0 did not come to '{name}' within {seconds:.0f} s (timeouts.rendezvous). Look into its log."
                ) from None


def ranks(numbers: Sequence[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0, 2 and 3", "ranks 0 to 7"."""
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def differences(what: str, values: Sequence[str]) -> str:
    """Says who has which value: "optimizer.learning_rate: 0.1 on ranks 0 and 2, 0.2 on rank 1"."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return f"{what}: " + ", ".join(f"{value} on {ranks(having)}" for value, having in holders.items())
