"""rollbacks.json: when a run went back to a checkpoint, why, and which batches it leaves out since.

The order of data is that of the seed, whatever was left out; batches are left out by their number in it. A batch is
left out from the step on at which it came, so every checkpoint before has trained on the same batches with and without
it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..mesh.errors import UserError

NAME = "rollbacks.json"


class Rollback(NamedTuple):
    """One time that a run went back.

    Attributes:
        step: the step that was not finite.
        to: the step it went back to.
        batch: number of the batch of that step in the order of data, from 0; left out since.
        samples: the first and the last global sample of that batch.
        found: what was found, in words.
        at: local time.
    """

    step: int
    to: int
    batch: int
    samples: tuple[int, int]
    found: str
    at: str

    def __str__(self) -> str:
        first, last = self.samples
        return f"step {self.step} ({self.at}): {self.found}; batch {self.batch}, samples {first} to {last}"


def as_json(rollbacks: Iterable[Rollback]) -> str:
    """The text of the file."""
    return json.dumps({"rollbacks": [each._asdict() for each in rollbacks]}, indent=2) + "\n"


def from_json(text: str, path: Path) -> list[Rollback]:
    """Reads the text of the file.

    Args:
        text: "" where there is no file.
        path: The file, for messages.

    Raises:
        UserError: It holds something else.
    """
    try:
        return [_as_rollback(each) for each in json.loads(text)["rollbacks"]] if text else []
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is damaged ({error}): it says which batches the run leaves out. Put it back from a copy, or start "
            "anew: with another run.dir, or with --fresh, which moves this run aside."
        ) from error


def _as_rollback(values: Any) -> Rollback:
    found = Rollback(**values)
    numbers = [found.step, found.to, found.batch, *found.samples]
    if not all(type(number) is int and number >= 0 for number in numbers) or len(found.samples) != 2:
        raise ValueError(f"a rollback of {values}")
    return found._replace(samples=(found.samples[0], found.samples[1]))
