"""Compares replicas that should be equal: if they differ, the run ends and restarts from an earlier checkpoint.

Every state is compared before it is saved, so the replicas of the latest checkpoint were equal. The run ends with exit
code 75, and the steps since then are computed again, which reveals the kind of fault:

    it does not recur    transient, such as a particle that hit a memory cell; reported once
    it recurs            permanent: the device is faulty and must be replaced

`guards.json` in the run directory keeps the findings with their devices over all restarts.
"""

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jax import Array

from ...checkpoints.replicas import Difference, ReplicaCheck, ReplicasDiffer
from ...layouts.paths import some
from ...mesh.compat import Device
from ...mesh.devices import device_name
from ...mesh.errors import counted
from ...mesh.files import write_text
from ...mesh.processes import exchange, is_main_process
from ...parallel.step.state import TrainState

NAME = "guards.json"
BEHIND = 3
"""Steps after which the sums of a state are available without waiting."""


class Finding(NamedTuple):
    """One difference between replicas.

    Attributes:
        step: Steps done when the replicas differed.
        at: The local time.
        arrays: Paths in the state.
        devices: The suspected devices, see `_identity`.
        verdict: "" if not known yet, "transient" or "lasting".
    """

    step: int
    at: str
    arrays: Sequence[str]
    devices: Sequence[str]
    verdict: str = ""


class ReplicaGuard:
    """Compares the state of a run every few steps, and before every save."""

    def __init__(
        self, check: ReplicaCheck, folder: Path, every: int, say: Callable[[str], None], *, seconds: float
    ) -> None:
        """Compiles the comparison. Every process of the run calls this, and all methods at the same steps.

        Args:
            check: The comparison for the state of this run.
            folder: The run directory.
            every: Steps between two comparisons, besides those before saves; 0 = none.
            say: Prints a line.
            seconds: Seconds that the processes wait for each other at the start.
        """
        self._check, self._folder, self._every, self._say = check, folder, every, say
        self._pending: tuple[int, Array] | None = None
        self._findings = read_findings(folder)
        hosts = exchange("replica hosts", socket.gethostname(), seconds=seconds)
        self._identities = [_identity(device, hosts[device.process_index]) for device in check.devices]
        check.compile()

    def after_step(self, number: int, state: TrainState) -> None:
        """Compares every few steps, without waiting for devices.

        Args:
            number: The step just started.
            state: The state after it, still being computed.

        Raises:
            ReplicasDiffer: The state of a few steps ago differed between devices.
        """
        if self._pending is not None and number >= self._pending[0] + BEHIND:
            self._settle()
        if self._every and number % self._every == 0:
            self._begin(number, state)

    def forget(self) -> None:
        """Drops the comparison in progress, because the run rolls back."""
        self._pending = None

    def compare(self, number: int, state: TrainState) -> None:
        """Compares now; waits for the devices.

        Raises:
            ReplicasDiffer: The state differs between devices.
        """
        self._begin(number, state)
        self._settle()

    def _begin(self, number: int, state: TrainState) -> None:
        if self._pending is None or self._pending[0] != number:
            self._settle()
            self._pending = number, self._check.begin(state)

    def _settle(self) -> None:
        if self._pending is not None:
            (number, sums), self._pending = self._pending, None
            self._judge(number, self._check.differences(sums))

    def _judge(self, number: int, found: Sequence[Difference]) -> None:
        if found:
            raise ReplicasDiffer(self._record(number, found))
        here = set(self._identities)  # nothing is known about other devices
        for index, each in enumerate(self._findings):
            if not each.verdict and each.step <= number and {*each.devices} <= here:
                self._findings[index] = each._replace(verdict="transient")
                self._write()
                self._say(
                    f"The difference at step {each.step} on {some(each.devices)} ({each.at}) did not come again when "
                    "the steps were computed again: a transient fault."
                )

    def _record(self, number: int, found: Sequence[Difference]) -> str:
        suspects = list(dict.fromkeys(self._identities[each] for difference in found for each in difference.odd))
        before = [each for each in self._findings if set(each.devices) & set(suspects)]
        if before:
            suspects = [each for each in suspects if any(each in earlier.devices for earlier in before)]
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        arrays = tuple(dict.fromkeys(each.path for each in found))
        self._findings.append(Finding(number, now, arrays, tuple(suspects), "lasting" if before else ""))
        self._write()
        advice = (
            "The latest checkpoint is older, and its copies were equal. The same command goes on from it and computes "
            "the steps again, which shows if the fault was transient or is lasting."
        )
        if before:
            advice = (
                f"It is not the first time: {some(suspects)} was found at step {before[0].step} too ({before[0].at}). "
                "The fault is lasting: replace it, or run without it. The same command goes on from the latest "
                "checkpoint, whose copies were equal."
            )
        return f"{self._check.describe(number, found)}\n{advice}"

    def _write(self) -> None:
        if not is_main_process():
            return
        finds = [each._asdict() for each in self._findings]
        with suppress(OSError):  # the log has the findings too
            write_text(self._folder / NAME, json.dumps({"finds": finds}, indent=2) + "\n")


def read_findings(folder: Path) -> list[Finding]:
    """Returns the findings of earlier starts of a run; none if the file is missing or corrupt."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        finds = json.loads((folder / NAME).read_text(encoding="utf-8"))["finds"]
        return [Finding(**each) for each in finds]
    return []


def describe_coverage(check: ReplicaCheck, every: int) -> str:
    """Returns a line about the part of the state that is compared; a flipped bit in the rest is not found."""
    share = 100 * check.bytes_compared / max(check.bytes_of_state, 1)
    return (
        f"The part of the state that several devices hold copies of ({counted(len(check.paths), 'array')}, "
        f"{share:.3g} % of the bytes) is compared every {counted(every, 'step')} and before every save."
    )


def _identity(device: Device, host: str) -> str:
    """Returns a name of a device that is stable over restarts: for GPUs and TPUs, its position in its host."""
    number = getattr(device, "local_hardware_id", None)
    if device.platform == "cpu" or number is None:
        return f"{device_name(device)} on {host}"
    return f"{device.platform} {number} of host {host}"
