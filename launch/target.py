"""Where to launch: `--on local:2x4`."""

import re
from typing import NamedTuple

from ..mesh.errors import UserError

FORM = "local:PxD, P processes that simulate D CPU devices each, such as local:2x4"

MOST_PROCESSES, MOST_DEVICES = 256, 4096


class LocalTarget(NamedTuple):
    """Processes on this machine.

    Attributes:
        num_processes: How many, at least 1.
        devices: CPU devices that each of them simulates, at least 1.
    """

    num_processes: int
    devices: int

    def __str__(self) -> str:
        return f"local:{self.num_processes}x{self.devices}"


def parse_target(text: str) -> LocalTarget:
    """Reads a target.

    Raises:
        UserError: It is of another form, or more than a machine can run; the message says which form there is.
    """
    match = re.fullmatch(r"local:([1-9][0-9]*)x([1-9][0-9]*)", text)
    if match is None:
        raise UserError(f"--on {text!r} is not a target; give {FORM}.")
    target = LocalTarget(*(int(number[:20]) for number in match.groups()))
    if target.num_processes > MOST_PROCESSES or target.devices > MOST_DEVICES:
        raise UserError(
            f"--on {text[:60]!r}: one machine runs at most {MOST_PROCESSES} processes of {MOST_DEVICES} simulated "
            "devices. Give fewer."
        )
    return target
