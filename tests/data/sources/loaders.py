"""Loaders of batches, as other libraries have them."""

import numpy as np

ROWS = 30


class Loader:
    """As a DataLoader: (inputs, targets) in batches of four, shuffled anew each time; the last one is small."""

    def __init__(self, rows=ROWS, seed=None):
        self.rows, self.random, self.times = rows, np.random.default_rng(seed), 0

    def __iter__(self):
        self.times += 1
        order = self.random.permutation(self.rows)
        for start in range(0, self.rows, 4):
            chosen = order[start : start + 4]
            yield np.stack([chosen, chosen], 1).astype(np.float32), chosen


def epoch(number):
    """A function of the epoch: the same rows every time it is asked."""
    return Loader(seed=number)
