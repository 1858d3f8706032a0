"""Where to launch: `--on local:2x4`."""

import re
from typing import NamedTuple

from ..mesh.errors import UserError

FORM = "local:PxD, P processes that simulate D CPU devices each, such as local:2x4"


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
        UserError: It is of another form; the message says which form there is.
    """
    match = re.fullmatch(r"local:([1-9][0-9]*)x([1-9][0-9]*)", text)
    if match is None:
        raise UserError(f"--on {text!r} is not a target; give {FORM}.")
    return LocalTarget(int(match[1]), int(match[2]))
