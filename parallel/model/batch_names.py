"""Suggestions for unknown names of batch arrays."""

from collections.abc import Collection, Iterable

from ...mesh.errors import nearest

SYNONYMS = {
    "targets": ("labels", "label", "target", "y", "y_true", "ys", "classes", "answers", "output", "outputs", "next"),
    "inputs": ("x", "xs", "input", "input_ids", "tokens", "features", "image", "images", "data", "text", "ids", "obs"),
    "weights": ("weight", "mask", "masks", "loss_mask", "attention_mask", "sample_weight", "sample_weights", "w"),
    "example": ("index", "indices", "idx", "row", "rows", "id", "example_id"),
}
"""Name of an array of a batch -> its names in other libraries."""
CUTOFF = 0.7


def guess_name(name: object, batch: Iterable[str], others: Collection[str] = ()) -> str:
    """Returns the valid name that is closest to an unknown one.

    Args:
        name: The unknown name.
        batch: The names of the batch's arrays.
        others: Other valid names in the same code, such as those of parameters.

    Returns:
        One of these names, or "" if none is similar.
    """
    batch = list(batch)
    meant = [array for array in batch if str(name).lower() in SYNONYMS.get(array, ())]
    return next(iter([*meant, *nearest(name, [*batch, *others], cutoff=CUTOFF)]), "")


def explain_key_error(error: KeyError, batch: Iterable[str]) -> str:
    """Returns a message for a KeyError from reading a batch, with the valid names; "" for other keys.

    Args:
        error: The error.
        batch: The names of the batch's arrays.
    """
    batch = list(batch)
    name = error.args[0] if error.args else None
    if not isinstance(name, str) or name in batch:
        return ""
    near = guess_name(name, batch)
    return f"The batch does not contain {name!r}, only {', '.join(batch)}.{f' Did you mean {near!r}?' if near else ''}"
