"""What a callback may ask of a run: to end, to evaluate, to save, to train with another learning rate.

Callbacks run in every process; of what they ask, process 0's counts. In a pause (an evaluation, a save, the end of an
epoch) all hear of it at once; anywhere else they agree on the next step that none of them has started (`Gate.ask`).
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Literal, Self

End = Literal["", "finished", "interrupted", "try_again"]


@dataclass(frozen=True, kw_only=True)
class Asks:
    """What is asked for after one step.

    Attributes:
        end: "" to go on; finished, the run is complete; interrupted, the same command goes on later; try_again, so does
            whoever starts it again by itself (exit code 75).
        reason: of the end, for people.
        evaluate: evaluate now.
        save: save now.
        factor: what updates are multiplied by from now on, times what they were multiplied by before.
        parts: name of a part of the parameters -> what its updates are multiplied by from now on, 0 for none.
    """

    end: End = ""
    reason: str = ""
    evaluate: bool = False
    save: bool = False
    factor: float = 1.0
    parts: dict[str, float] = field(default_factory=dict)

    def __or__(self, other: "Asks") -> "Asks":
        """Both; of two ends the first, of two factors of one part the last."""
        first = self if self.end else other
        return Asks(
            end=first.end,
            reason=first.reason,
            evaluate=self.evaluate or other.evaluate,
            save=self.save or other.save,
            factor=self.factor * other.factor,
            parts={**self.parts, **other.parts},
        )

    def __bool__(self) -> bool:
        return self != Asks()

    def text(self) -> str:
        """As the processes of a run tell it each other."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, texts: Iterable[str]) -> Self:
        """All of what several texts ask for."""
        return reduce(cls.__or__, (cls(**json.loads(text)) for text in texts), cls())  # pyright: ignore
