"""Generated data: noisy images of the ten digits, 8 x 8 pixels, at random places; rows of random tokens."""

from math import ceil

import numpy as np

from ..config import DataConfig
from ..source import Splits, fingerprint, splits_of
from .arrays import ArraySource, divide_source

HEIGHT = 8
WIDTH = 8
CLASSES = 10
FEATURES = HEIGHT * WIDTH
GLYPHS = (  # each digit as 7 rows of 5 pixels, top to bottom, the bits of one number a row
    (0x0E, 0x11, 0x13, 0x15, 0x19, 0x11, 0x0E),
    (0x04, 0x0C, 0x04, 0x04, 0x04, 0x04, 0x0E),
    (0x0E, 0x11, 0x01, 0x02, 0x04, 0x08, 0x1F),
    (0x1F, 0x02, 0x04, 0x02, 0x01, 0x11, 0x0E),
    (0x02, 0x06, 0x0A, 0x12, 0x1F, 0x02, 0x02),
    (0x1F, 0x10, 0x1E, 0x01, 0x01, 0x11, 0x0E),
    (0x06, 0x08, 0x10, 0x1E, 0x11, 0x11, 0x0E),
    (0x1F, 0x01, 0x02, 0x04, 0x08, 0x08, 0x08),
    (0x0E, 0x11, 0x11, 0x0E, 0x11, 0x11, 0x0E),
    (0x0E, 0x11, 0x11, 0x0F, 0x01, 0x02, 0x0C),
)


def synthetic_digits(eval_fraction: float, *, rows: int = 8192, noise: float = 0.4, seed: int = 0) -> Splits:
    """Returns noisy digits: {"inputs": float32 (64,), "targets": int32 () in [0, 10), "weights": float32 ()}.

    Args:
        eval_fraction: Share of examples held out, in [0, 1).
        rows: Number of examples in both splits.
        noise: Standard deviation of the noise on pixels, which are 0 or 1.
        seed: Selects digits, places and noise.

    Returns:
        The splits, the same for the same arguments.
    """
    random = np.random.default_rng(seed)
    targets = random.integers(CLASSES, size=rows)
    tops = random.integers(HEIGHT - 7 + 1, size=rows)
    lefts = random.integers(WIDTH - 5 + 1, size=rows)
    images = _placements()[targets, tops, lefts]
    inputs = images.reshape(rows, FEATURES) + random.normal(scale=noise, size=(rows, FEATURES))
    arrays = {"inputs": inputs.astype(np.float32), "targets": targets.astype(np.int32)}
    description = f"synthetic: {rows:,} noisy images of digits, {FEATURES} features, {CLASSES} classes"
    return divide_source(ArraySource(arrays), eval_fraction)._replace(description=description)


def _placements() -> np.ndarray:
    """Returns every digit at every place: (digit, top, left, HEIGHT, WIDTH)."""
    glyphs = np.array([[[row >> (4 - column) & 1 for column in range(5)] for row in glyph] for glyph in GLYPHS])
    places = np.zeros((CLASSES, HEIGHT - 7 + 1, WIDTH - 5 + 1, HEIGHT, WIDTH))
    for top, left in np.ndindex(places.shape[1:3]):
        places[:, top, left, top : top + 7, left : left + 5] = glyphs
    return places


TOKEN_ROWS = 8192
TOKEN_STEPS = 3


class SyntheticTokens:
    """Rows of tokens in which each token exceeds the one before it by 1, 2 or 3, modulo the vocabulary.

    The increments are uniform and independent, so no model predicts them to less than ln 3 = 1.10 nats. Nothing is
    stored: example i is a function of the seed and of `first` + i, and takes {"inputs": int32 (L,), "targets": int32
    (L,), "weights": float32 (L,)}, as text does.

    Args:
        first: The row that is example 0.
        rows: The number of examples.
        length: Tokens per example, L.
        vocabulary: The number of token ids.
        seed: Selects the tokens.
    """

    def __init__(self, first: int, rows: int, length: int, vocabulary: int, seed: int = 0) -> None:
        self._first = first
        self._rows = rows
        self._length = length
        self._vocabulary = vocabulary
        self._seed = seed

    def __len__(self) -> int:
        """Returns the number of examples."""
        return self._rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Returns example `index`, in [0, len)."""
        if not 0 <= index < self._rows:
            raise IndexError(f"example {index} of {self._rows}")
        random = np.random.default_rng((self._seed, self._first + index))
        steps = random.integers(1, TOKEN_STEPS + 1, size=self._length + 1)
        steps[0] = random.integers(self._vocabulary)
        ids = (steps.cumsum() % self._vocabulary).astype(np.int32)
        return {"inputs": ids[:-1], "targets": ids[1:], "weights": np.ones(self._length, np.float32)}


def synthetic_tokens(config: DataConfig, batch: int = 1) -> Splits:
    """Returns rows of random tokens, see `SyntheticTokens`.

    Args:
        config: `length`, `eval_fraction`, and `vocabulary` (0: 256).
        batch: Rows of a training batch; if 8,192 rows do not have as many for training, there are more.

    Returns:
        The splits, the same for the same arguments.
    """
    length = config.length
    vocabulary = config.vocabulary or 256
    total = max(TOKEN_ROWS, ceil(batch / (1 - config.eval_fraction)))
    count = total - round(total * config.eval_fraction)
    sources = [SyntheticTokens(0, count, length, vocabulary)]
    if count < total:
        sources.append(SyntheticTokens(count, total - count, length, vocabulary))
    description = f"synthetic_tokens: {total:,} rows of {length:,} random tokens, vocabulary {vocabulary:,}"
    return splits_of(sources, vocabulary, description, fingerprint([], "synthetic_tokens", count, length, vocabulary))
