"""The pairs (sum, weight) that a loss returns for a few rows in several arrangements, and their comparisons."""

from typing import NamedTuple

import numpy as np


class Pair(NamedTuple):
    """The result of a loss for some rows: the sum of the weighted losses and the sum of the weights."""

    total: float
    weight: float

    def __str__(self) -> str:
        return f"({self.total:.6g}, {self.weight:.6g})"

    @property
    def is_finite(self) -> bool:
        """Returns whether both numbers are finite."""
        return bool(np.isfinite(self).all())


NOTHING = Pair(0.0, 0.0)


class Pairs(NamedTuple):
    """The pairs of four rows in all arrangements; `unweighted` is None for a batch without weights."""

    whole: Pair
    first: Pair
    second: Pair
    shuffled: Pair
    unweighted: Pair | None

    @property
    def halves(self) -> Pair:
        """The sum of the two halves."""
        return Pair(self.first.total + self.second.total, self.first.weight + self.second.weight)

    def apart(self, pair: Pair, other: Pair) -> Pair:
        """Returns the distances of two pairs, relative to the whole and its halves; infinite if one is not finite."""
        scales = np.abs(np.array((self.whole, self.first, self.second))).sum(axis=0)
        return Pair(*(_relative(a - b, scale) for a, b, scale in zip(pair, other, scales, strict=True)))

    def adds_up(self, bound: float, constant: float = 0.0) -> bool:
        """Returns whether the sums of the losses add up, in any order, apart from a constant that every call adds."""
        halves = self.halves._replace(total=self.halves.total - constant)
        return all(self.apart(other, self.whole).total <= bound for other in (halves, self.shuffled))

    def weights_add_up(self, bound: float) -> bool:
        """Returns whether the weights add up, in any order."""
        return all(self.apart(other, self.whole).weight <= bound for other in (self.halves, self.shuffled))

    def ignores_padding(self, bound: float) -> bool:
        """Returns whether rows with weights of zero give (0, 0)."""
        return self.unweighted is None or max(self.apart(self.unweighted, NOTHING)) <= bound

    def are_right(self, bound: float) -> bool:
        """Returns whether all pairs that must agree do so, and the rows have a weight."""
        agree = self.adds_up(bound) and self.weights_add_up(bound) and self.ignores_padding(bound)
        return agree and self.whole.weight != 0

    def adds_a_constant(self, bound: float) -> bool:
        """Returns whether every call adds the same constant, such as a penalty on the parameters, to other sums."""
        zero = self.unweighted
        if zero is None or not zero.is_finite:
            return False
        parts = (self.apart(zero, NOTHING), self.apart(zero, self.whole))
        return all(each.total > bound for each in parts) and self.adds_up(bound, zero.total)


def _relative(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return float(abs(difference) / scale) if np.isfinite(difference) and scale else np.inf
