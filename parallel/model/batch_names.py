"""Names under which a loss reads a batch, and which array is meant by a name that is not there."""

from collections.abc import Collection, Iterable

from ...mesh.near_miss import nearest

OTHER_WORDS = {
    "targets": ("labels", "label", "target", "y", "y_true", "ys", "classes", "answers", "output", "outputs", "next"),
    "inputs": ("x", "xs", "input", "input_ids", "tokens", "features", "image", "images", "data", "text", "ids", "obs"),
    "weights": ("weight", "mask", "masks", "loss_mask", "attention_mask", "sample_weight", "sample_weights", "w"),
    "example": ("index", "indices", "idx", "row", "rows", "id", "example_id"),
}
"""Name of an array of a batch -> what others call it."""
CUTOFF = 0.7


def meant(name: object, batch: Iterable[str], others: Collection[str] = ()) -> str:
    """The name that is meant by one that a batch does not hold.

    Args:
        name: What was read.
        batch: The names of the batch's arrays.
        others: Names of other things that the same code reads, such as its parameters.

    Returns:
        One of the batch's, or of the others; "" where none is near.
    """
    batch = list(batch)
    word = str(name).lower()
    for array in batch:
        if word in OTHER_WORDS.get(array, ()):
            return array
    return next(iter(nearest(name, [*batch, *others], cutoff=CUTOFF)), "")


def of_missing_key(error: KeyError, batch: Iterable[str]) -> str:
    """What to say of a KeyError where a batch was read: the names that it holds; "" where it was read by none of them.

    Args:
        error: As it was raised.
        batch: The names of the batch's arrays.
    """
    batch = list(batch)
    name = error.args[0] if error.args else None
    if not isinstance(name, str) or name in batch:
        return ""
    near = meant(name, batch)
    return f"The batch holds {', '.join(batch)}, and no {name!r}.{f' Did you mean {near!r}?' if near else ''}"
