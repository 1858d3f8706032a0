"""Examples with several inputs or outputs: nested names in one flat batch.

    {"image": a, "targets": {"label": b, "box": c}}      what an example is made of
    {"image": a, "targets/label": b, "targets/box": c}   what a batch holds, and a loss reads

A batch is flat, so that every array in it has one name in messages, checks and layouts. `nested` gives a loss the other
form back; under `jit` it costs nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..mesh.errors import UserError

SEPARATOR = "/"
PAIR = ("inputs", "targets")


def flat(example: Any, names: Sequence[str] = PAIR) -> dict[str, Any]:
    """The arrays of an example by name.

    Args:
        example: A mapping, whose values may be mappings and lists again; or a tuple or list, named by `names`.
        names: What the entries of a tuple are; a third entry beside inputs and targets is weights, as in tf.data and
            Keras.

    Returns:
        Name -> leaf; names of different levels are joined by "/", entries of lists are "0", "1", ...

    Raises:
        UserError: it is neither, has not as many entries as names, or two of its names are the same when joined.
    """
    if isinstance(example, tuple | list):
        names = (*names, "weights") if tuple(names) == PAIR and len(example) == 3 else names
        if len(example) != len(names):
            raise UserError(
                f"an example has {len(example)} entries, and their names are {', '.join(names) or 'none'}. Give "
                "as many names, or make examples dicts."
            )
        example = dict(zip(names, example, strict=True))
    if not isinstance(example, Mapping):
        raise UserError(
            f"an example is a {type(example).__name__}; it is a dict of arrays, or a tuple of them, with names."
        )
    pairs = [*_leaves(example)]
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name in found if [each for each, _ in pairs].count(name) > 1)
        raise UserError(f"an example holds {twice!r} twice: once nested, once under that name. Rename one.")
    return found


def _leaves(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Every leaf with its joined name; lists of numbers are leaves."""
    for key, value in tree.items():
        if isinstance(value, tuple | list) and any(_is_array_or_tree(item) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from ((f"{key}{SEPARATOR}{name}", leaf) for name, leaf in _leaves(value))
        else:
            yield str(key), value


def _is_array_or_tree(value: Any) -> bool:
    return isinstance(value, Mapping) or getattr(value, "ndim", 0) > 0


def nested(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with its names taken apart again: {"targets/box": a} becomes {"targets": {"box": a}}.

    Args:
        batch: Name -> array.

    Returns:
        Nested dicts; what were lists are dicts with the keys "0", "1", ...
    """
    tree: dict[str, Any] = {}
    for name, value in batch.items():
        *above, last = name.split(SEPARATOR)
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return tree
