"""Several documents in one example: which document each token belongs to, and where it stands in it.

    inputs      a b 0 c d 0 e       0 ends a document
    targets     b 0 c d 0 e f
    segments    0 0 0 1 1 1 2       attention stays within a segment
    positions   0 1 2 0 1 2 0       counted from the document's first token in the example
    weights     1 1 0 1 1 0 1       what follows the end of a document cannot be told from it

A separator belongs to the document that it ends, and is a target as any token. A document that an example cuts off goes
on in another one as a document of its own.

Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination".
"""

import numpy as np


def mark_documents(inputs: np.ndarray, separator: int) -> dict[str, np.ndarray]:
    """What packed examples hold besides inputs and targets.

    Args:
        inputs: int32, (N, L), token ids.
        separator: The id that ends a document.

    Returns:
        "segments": int32, (N, L), 0, 1, 2, ... in each example; "positions": int32, (N, L); "weights": float32, (N, L),
        0 where the target is the first token of another document.
    """
    ends = inputs == separator
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    column = np.arange(inputs.shape[1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts, column, 0), axis=1)
    return {
        "segments": np.cumsum(starts, axis=1, dtype=np.int32),
        "positions": (column - first).astype(np.int32),
        "weights": (~ends).astype(np.float32),
    }
