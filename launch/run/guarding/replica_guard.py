"""What follows when copies of a state that should be equal are not: the run ends, and starts again from before.

Every state is compared before it is saved, so the newest checkpoint is one that was found equal. The run ends with code
75, the steps since are computed again, and that tells what kind of fault it was:

    it does not come again        transient, such as a particle that hit a memory cell; said once
    it comes again                lasting: the device is at fault, and has to be replaced

`guards.json` in the folder of the run keeps what was found, on which device, over all restarts.
"""

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jax import Array

from ....mesh.compat import Device
from ....mesh.coordination import exchange
from ....mesh.devices import device_name
from ....mesh.processes import is_main_process
from ....mesh.text import counted
from ....parallel.step.state import TrainState
from ....training.watching.replicas import Difference, ReplicaCheck, ReplicasDiffer, few

NAME = "guards.json"
BEHIND = 3
"""Steps after which the sums of a state are there, so that reading them waits for nothing."""


class Find(NamedTuple):
    """What was found once.

    Attributes:
        step: steps done when copies differed.
        at: local time.
        arrays: paths in the state.
        devices: which may be at fault: host and device, see `_identity`.
        verdict: "", not known yet; "transient"; or "lasting".
    """

    step: int
    at: str
    arrays: tuple[str, ...]
    devices: tuple[str, ...]
    verdict: str = ""


class ReplicaGuard:
    """Compares the state of a run every few steps, and before every save."""

    def __init__(
        self, check: ReplicaCheck, folder: Path, every: int, say: Callable[[str], None], *, seconds: float
    ) -> None:
        """Compiles the comparison. Every process of the run calls this, and all methods at the same steps.

        Args:
            check: Of the state of this run.
            folder: Of the run.
            every: Steps between two comparisons beside those before saves; 0 = none.
            say: Gets a line.
            seconds: How long processes wait for each other at the start.
        """
        self._check, self._folder, self._every, self._say = check, folder, every, say
        self._pending: tuple[int, Array] | None = None
        self._finds = read_finds(folder)
        hosts = exchange("replica hosts", socket.gethostname(), seconds=seconds)
        self._identities = [_identity(device, hosts[device.process_index]) for device in check.devices]
        if check.paths:
            check.compile()

    def after_step(self, number: int, state: TrainState, *, later: bool) -> None:
        """Compares every few steps, without waiting for devices.

        Args:
            number: The step just started.
            state: After it, still being computed.
            later: Whether `compare` will be called with this state, so that it need not be looked at here.

        Raises:
            ReplicasDiffer: The state of a few steps ago was not the same on all devices.
        """
        if self._pending is not None and number >= self._pending[0] + BEHIND:
            self._settle()
        if self._every and number % self._every == 0 and not later and self._check.paths:
            self._settle()
            self._pending = number, self._check.begin(state)

    def forget(self) -> None:
        """Drops what was begun: the run goes back to before it."""
        self._pending = None

    def compare(self, number: int, state: TrainState) -> None:
        """Compares now; waits for the devices.

        Raises:
            ReplicasDiffer: The state is not the same on all devices.
        """
        self._settle()
        if self._check.paths:
            self._judge(number, self._check.differences(self._check.begin(state)))

    def _settle(self) -> None:
        if self._pending is not None:
            (number, sums), self._pending = self._pending, None
            self._judge(number, self._check.differences(sums))

    def _judge(self, number: int, found: Sequence[Difference]) -> None:
        if found:
            raise ReplicasDiffer(self._tell(number, found))
        here = set(self._identities)  # of another device nothing can be said
        again = [each for each in self._finds if not each.verdict and each.step <= number and {*each.devices} <= here]
        if again:
            self._finds = [each._replace(verdict="transient") if each in again else each for each in self._finds]
            self._write()
        for each in again:
            self._say(
                f"What was found at step {each.step} on {few(each.devices)} ({each.at}) did not come again when the "
                "steps were computed again: a transient fault."
            )

    def _tell(self, number: int, found: Sequence[Difference]) -> str:
        suspects = list(dict.fromkeys(self._identities[each] for difference in found for each in difference.odd))
        before = [each for each in self._finds if set(each.devices) & set(suspects)]
        if before:
            suspects = [each for each in suspects if any(each in earlier.devices for earlier in before)]
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        arrays = tuple(dict.fromkeys(each.path for each in found))
        self._finds.append(Find(number, now, arrays, tuple(suspects), "lasting" if before else ""))
        self._write()
        return f"{self._check.describe(number, found)}\n{_advice(suspects, before)}"

    def _write(self) -> None:
        if not is_main_process():
            return
        finds = [each._asdict() for each in self._finds]
        path = self._folder / NAME
        partial = path.with_name(f"{NAME}.partial")
        with suppress(OSError):  # what was found is in the log too
            partial.write_text(json.dumps({"finds": finds}, indent=2) + "\n", encoding="utf-8")
            partial.replace(path)


def read_finds(folder: Path) -> list[Find]:
    """What was found in earlier starts of a run; nothing where its file is missing or damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        finds = json.loads((folder / NAME).read_text(encoding="utf-8"))["finds"]
        return [_as_find(each) for each in finds]
    return []


def coverage(check: ReplicaCheck, every: int) -> str:
    """What is compared, in a line for people."""
    if not check.paths:
        return "guards.replicas_every: one device holds the whole state, so there are no copies to compare."
    share = 100 * check.bytes_compared / check.bytes_of_state
    steps = "step" if every == 1 else f"{every} steps"
    rest = "" if share > 99.9 else "; the rest has no copy, so a bit that flips there is not found"
    return (
        f"What several devices hold copies of ({counted(len(check.paths), 'array')}, {share:.3g} % of the bytes of the "
        f"state) is compared every {steps} and before every save{rest}."
    )


def _as_find(values: Any) -> Find:
    find = Find(**values)
    return find._replace(step=int(find.step), arrays=tuple(find.arrays), devices=tuple(find.devices))


def _identity(device: Device, host: str) -> str:
    """What a device is called over restarts: CPU devices by their name, others by their place in their host."""
    number = getattr(device, "local_hardware_id", None)
    if device.platform == "cpu" or number is None:
        return f"{device_name(device)} on {host}"
    return f"{device.platform} {number} of host {host}"


def _advice(suspects: Sequence[str], before: Sequence[Find]) -> str:
    if before:
        first = before[0]
        return (
            f"It is not the first time: {few(suspects)} was found at step {first.step} too ({first.at}). The fault is "
            "lasting: replace it, or run without it. The same command goes on from the newest checkpoint, whose copies "
            "were equal."
        )
    return (
        "The newest checkpoint is older, and its copies were equal. The same command goes on from it and computes the "
        "steps again, which tells whether the fault was transient or is lasting."
    )
