"""run.dir is one folder for all processes of a run: each writes its part of a checkpoint there, and reads it again.

Where it is not (a disk of each host, another working directory), every process would train, and no checkpoint ever be
whole. So all compare the newest checkpoint that they see, and once process 0 owns the folder, all others look for its
mark there.
"""

import json
import os
import time
from pathlib import Path

import jax

from ....mesh.compat import coordination_client
from ....mesh.coordination import PREFIX, differences, exchange, ranks
from ....mesh.errors import UserError
from .owner import read_owner, this_place

SEE_SECONDS = 60.0
"""For a file to be seen on another host: file systems of networks remember for so long that there was none."""
POLL_SECONDS = 0.2
LEAVE_SECONDS = 5.0
"""How long process 0 waits for the others before it ends."""


class NotShared(UserError):
    """The processes of a run see different folders under one name."""


def check_same_step(folder: Path, step: int, seconds: float, name: str = "the step to go on from") -> None:
    """Makes sure that all processes would go on from the same checkpoint. Every process of the run calls this.

    Args:
        folder: `run.dir`, absolute.
        step: Steps done in the newest checkpoint that this process sees there; 0 = none.
        seconds: How long to wait for the other processes.
        name: What they compare; used once.

    Raises:
        NotShared: Some see others; they are named.
        ProcessesMissing: Some did not answer in time.
    """
    steps = exchange(name, str(step), seconds=seconds)
    other = next((rank for rank, each in enumerate(steps) if each != steps[0]), None)
    if other is not None:
        wait_until_all_know()
        raise not_shared(folder, other, differences("newest checkpoint there", steps))


def check_shared(folder: Path, seconds: float) -> None:
    """Makes sure that all processes see the folder that process 0 owns. Every process of the run calls this.

    Args:
        folder: `run.dir`, absolute; process 0 has made it and owns it.
        seconds: How long to wait for the other processes.

    Raises:
        NotShared: Some see another; they are named.
        ProcessesMissing: Some did not answer in time.
    """
    if jax.process_count() == 1:
        return
    text = ""
    if jax.process_index() == 0:
        owner = read_owner(folder)
        text = json.dumps([owner.token if owner else "", *_identity(folder)])
    texts = exchange("run.dir is owned", text, seconds=seconds)
    token, place, number = json.loads(texts[0])
    mine = _identity(folder)  # not before: process 0 has just made it
    another = place == mine[0] and number != mine[1]  # on one host nothing is seen late
    seen = not another and _sees(folder, token, min(seconds, SEE_SECONDS))
    answers = exchange("run.dir is seen", "yes" if seen else "no", seconds=seconds + SEE_SECONDS)
    blind = [rank for rank, answer in enumerate(answers) if answer != "yes"]
    if blind:
        wait_until_all_know()
        raise not_shared(folder, blind[0])


def not_shared(folder: Path, rank: int, seen: str = "") -> NotShared:
    """The error of a folder that a process does not share with process 0.

    Args:
        folder: `run.dir`.
        rank: Of the process.
        seen: What they see in it.
    """
    return NotShared(
        f"run.dir is not shared between {ranks([0, rank])}: {folder} of one is not that of the other"
        f"{f' ({seen})' if seen else ''}. Every process writes its part of a checkpoint into it. Set run.dir to an "
        "absolute path on a file system that all hosts mount."
    )


def wait_until_all_know() -> None:
    """Called by every process of a run that is about to end for a reason that all of them have found.

    Process 0 holds the service over which they find it: it goes last, or JAX aborts the others before they can tell.
    """
    client, left = coordination_client(), f"{PREFIX}leaving/"
    if client is None:
        return
    client.key_value_set(f"{left}{jax.process_index()}", "", allow_overwrite=True)
    deadline = time.monotonic() + LEAVE_SECONDS
    while jax.process_index() == 0 and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if len(client.key_value_dir_get(left)) == jax.process_count():
            time.sleep(POLL_SECONDS)
            return


def _identity(folder: Path) -> tuple[str, str]:
    """The host, and what a folder is known by there."""
    try:
        found = folder.stat()
    except OSError:
        return this_place(), "nothing"
    return this_place(), f"{found.st_dev} {found.st_ino}"


def _sees(folder: Path, token: str, seconds: float) -> bool:
    """Whether the mark of an owner is in a folder, or comes within some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        if os.path.isdir(folder):
            os.listdir(folder)  # what was remembered is looked up anew
        owner = read_owner(folder)
        if owner is not None and owner.token == token:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
