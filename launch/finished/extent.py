"""How many rows an evaluation takes, and how many those in the log of the run took: why their figures may differ."""

from typing import NamedTuple

from ...configs.schema import Config
from ...mesh.text import counted


class Extent(NamedTuple):
    """How much of a split an evaluation takes.

    Attributes:
        of: rows of the split.
        batch: rows of a batch.
        batches: how many it takes; None = all there are.
        logged: batches that an evaluation in the log of the run takes, of `logged_batch` rows each; 0 = all there are,
            None = none of the same rows.
        logged_batch: rows of each of those.
    """

    of: int
    batch: int
    batches: int | None = None
    logged: int | None = None
    logged_batch: int = 1

    @property
    def rows(self) -> int:
        """How many rows are taken."""
        return self.of if self.batches is None else min(self.of, self.batches * self.batch)

    @property
    def logged_rows(self) -> int | None:
        """How many an evaluation in the log of the run took; None where it took others."""
        if self.logged is None:
            return None
        return min(self.of, self.logged * self.logged_batch) if self.logged else self.of

    def __str__(self) -> str:
        rows = f"all {self.of:,} rows" if self.rows == self.of else f"{self.rows:,} of {self.of:,} rows"
        logged = ", as in the log of the run" if self.logged_rows == self.rows else ""
        return f"{rows}, {counted(-(-self.rows // self.batch), 'batch', 'batches')} of {self.batch:,}{logged}"

    @property
    def difference(self) -> str:
        """What the log of the run took instead, and how to take the same; "" where there is no difference."""
        if self.logged_rows is None or self.logged_rows == self.rows:
            return ""
        if not self.logged:
            return "The log of the run has figures of all of them (eval.batches=0): leave out --batches for the same."
        fits = (self.logged * self.logged_batch) % self.batch == 0
        same = f": --batches {self.logged * self.logged_batch // self.batch} takes the same" if fits else ""
        return f"The log of the run has figures of {self.logged_rows:,} of them (eval.batches={self.logged}){same}."


def extent_of(source_rows: int, batch: int, batches: int | None, log: Config | None) -> Extent:
    """How much of a split an evaluation takes.

    Args:
        source_rows: Of the split.
        batch: Rows of a batch.
        batches: How many to take; None = all.
        log: The config that the run trains with, where it evaluates the same rows; else None.
    """
    if log is None:
        return Extent(source_rows, batch, batches)
    return Extent(source_rows, batch, batches, log.eval.batches, log.train.global_batch)


def other_parameters(ema: bool, log: Config | None) -> str:
    """Which parameters the evaluations in the log are of, where it is others than are evaluated; else "".

    Args:
        ema: Whether averages are evaluated.
        log: As in `extent_of`.
    """
    if log is None or ema == log.optimizer.ema.evaluate:
        return ""
    if ema:
        return "The log of the run has figures of the parameters themselves: leave out --ema for the same."
    return "The log of the run has figures of the averages (optimizer.ema.evaluate): --ema takes these."
