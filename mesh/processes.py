"""The processes of one run: their ranks, and short texts that they exchange over JAX's coordination service.

The service runs in process 0 and answers while devices are busy or stuck, so these exchanges do not depend on
collectives. An exchange between all processes takes a few milliseconds.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .compat import coordination_client
from .errors import TryAgain

PREFIX = "spmdkit/"
POLL_SECONDS = 0.05
PROGRESS_SECONDS = 10.0


def print_progress(line: str) -> None:
    """Prints a line about the start of a run to stderr."""
    print(line, file=sys.stderr, flush=True)


def is_main_process() -> bool:
    """Returns True in process 0, which prints and writes for all. Opens JAX's devices; call `initialize` first."""
    return jax.process_index() == 0


def local_copy(value: Any) -> Any:
    """Returns this process's copy of a replicated array; other values unchanged."""
    return value.addressable_data(0) if isinstance(value, jax.Array) else value


class ProcessesMissing(TryAgain):
    """Some processes did not answer in time; the same command can work later."""


def exchange(name: str, text: str, *, seconds: float) -> list[str]:
    """Sends a text to all processes of the run, and waits for theirs.

    Process 0 prints now and then which processes are missing. Unlike a collective barrier, the wait can be long: Gloo
    gives up 30 seconds after the first process.

    Args:
        name: The name of the exchange, used once.
        text: The text of this process.
        seconds: The timeout.

    Returns:
        The texts by rank.

    Raises:
        ProcessesMissing: Some ranks did not send theirs in time.
    """
    client = coordination_client()
    if client is None:
        return [text]
    folder = f"{PREFIX}{name}/"
    client.key_value_set(f"{folder}{jax.process_index()}", text)
    begin = reported = time.monotonic()
    while True:
        texts: dict[int, str] = {}
        for key, value in client.key_value_dir_get(folder):
            texts[int(key.rpartition("/")[2])] = value
        missing = [rank for rank in range(jax.process_count()) if rank not in texts]
        if not missing:
            return [texts[rank] for rank in range(jax.process_count())]
        now = time.monotonic()
        if now - begin > seconds:
            raise ProcessesMissing(
                f"{ranks(missing)} did not come to '{name}' within {seconds:.0f} s (timeouts.rendezvous); "
                f"{len(texts)} of {jax.process_count()} processes did. Look into their logs."
            )
        if now - reported > PROGRESS_SECONDS and is_main_process():
            print_progress(f"waiting for {ranks(missing)} at '{name}' ({now - begin:.0f} s)")
            reported = now
        time.sleep(POLL_SECONDS)


def broadcast_text(name: str, text: str, *, seconds: float) -> str:
    """Sends the text of process 0 to all processes.

    Process 0 does not wait. All processes must make the same calls in the same order.

    Args:
        name: The name of the exchange, used once.
        text: The text; only that of process 0 is used.
        seconds: The timeout of the others.

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
        try:  # short waits, so that Python handles signals
            return client.blocking_key_value_get(key, max(1, int(1000 * min(left, 1.0))))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if left <= 0:
                raise ProcessesMissing(
                    f"rank 0 did not come to '{name}' within {seconds:.0f} s (timeouts.rendezvous). Look into its log."
                ) from None


def ranks(numbers: Sequence[int]) -> str:
    """Formats ranks: "rank 1", "ranks 0, 2 and 3", "ranks 0 to 7"."""
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def unequal(mappings: Sequence[Mapping[str, Any]], missing: Any) -> dict[str, list[Any]]:
    """Returns the keys with different values: key -> its value in each mapping, `missing` if a mapping lacks it."""
    keys: dict[str, None] = {}
    for mapping in mappings:
        keys |= dict.fromkeys(mapping)
    different = {}
    for key in keys:
        values = [mapping.get(key, missing) for mapping in mappings]
        if any(value != values[0] for value in values):
            different[key] = values
    return different


def differences(what: str, values: Sequence[str]) -> str:
    """Formats the values of the ranks: "optimizer.learning_rate: 0.1 on ranks 0 and 2, 0.2 on rank 1"."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    parts = [f"{value} on {ranks(numbers)}" for value, numbers in holders.items()]
    return f"{what}: {', '.join(parts)}"
