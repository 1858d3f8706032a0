"""A small classification task made on the spot: noisy images of the ten digits, 8 x 8 pixels, at random places."""

import numpy as np

from ..source import Splits
from .arrays import held_out_rows

HEIGHT, WIDTH = 8, 8
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
    """Noisy digits: {"inputs": float32 (64,), "targets": int32 () in [0, 10), "weights": float32 ()}.

    Args:
        eval_fraction: Share of examples held out, in [0, 1).
        rows: Number of examples in both splits together.
        noise: Standard deviation of the noise on pixels, which are 0 or 1.
        seed: Chooses digits, places and noise.

    Returns:
        The splits, the same for the same arguments.
    """
    random = np.random.default_rng(seed)
    targets = random.integers(CLASSES, size=rows)
    images = _placements()[
        targets, random.integers(HEIGHT - 7 + 1, size=rows), random.integers(WIDTH - 5 + 1, size=rows)
    ]
    inputs = images.reshape(rows, FEATURES) + random.normal(scale=noise, size=(rows, FEATURES))
    arrays = {"inputs": inputs.astype(np.float32), "targets": targets.astype(np.int32)}
    description = f"synthetic: {rows:,} noisy images of digits, {FEATURES} features, {CLASSES} classes"
    return held_out_rows(arrays, eval_fraction)._replace(description=description)


def _placements() -> np.ndarray:
    """Every digit at every place: (digit, top, left, HEIGHT, WIDTH)."""
    glyphs = np.array([[[row >> (4 - column) & 1 for column in range(5)] for row in glyph] for glyph in GLYPHS])
    places = np.zeros((CLASSES, HEIGHT - 7 + 1, WIDTH - 5 + 1, HEIGHT, WIDTH))
    for top in range(HEIGHT - 7 + 1):
        for left in range(WIDTH - 5 + 1):
            places[:, top, left, top : top + 7, left : left + 5] = glyphs
    return places
