"""Explains collectives that a compiled step lacks: XLA merged them with others, or removed those that it does not need.

    fewer collectives, the same bytes    XLA merged some: their number does not matter to the result
    fewer collectives, more bytes        XLA merged some, and moves shards of axes that are left to it
    fewer bytes                          XLA removed some: no result depends on them, or an equal one remains

The parameters are named whose collectives move exactly the missing bytes. If the gradients of one device are known, and
the missing bytes are those of gradients that are zero or equal there, that is the cause.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...layouts.paths import leaves_with_paths, some
from ...layouts.sizes import format_bytes
from ..collectives import Amount, Collective, CollectiveKey, amount
from ..model import Params

MAX_PARAMETERS = 300
"""The maximum number of parameters whose collectives are computed one by one."""


class UnneededGradients(NamedTuple):
    """The gradients that one device does not need to sum.

    Attributes:
        zero: The parameters whose gradient is zero.
        equal: Groups of parameters whose gradients are equal, without those that are zero.
    """

    zero: tuple[str, ...] = ()
    equal: tuple[tuple[str, ...], ...] = ()


def find_unneeded(gradients: Params) -> UnneededGradients:
    """Finds the gradients that are zero, or equal to others.

    Args:
        gradients: The gradients of one device, on the host.
    """
    zero: list[str] = []
    groups: dict[Any, list[str]] = {}
    for path, leaf in leaves_with_paths(gradients):
        array = np.asarray(leaf)
        if not array.any():
            zero.append(path)
            continue
        groups.setdefault((array.shape, array.dtype.name, array.tobytes()), []).append(path)
    equal = tuple(tuple(paths) for paths in groups.values() if len(paths) > 1)
    return UnneededGradients(tuple(zero), equal)


def explain_fewer(
    key: CollectiveKey,
    predicted: Iterable[Collective],
    found: Iterable[Collective],
    cost: Callable[[Collection[str]], Sequence[Collective]],
    paths: Sequence[str],
    unneeded: UnneededGradients,
) -> str:
    """Returns what XLA merged or removed, as the end of a sentence.

    Args:
        key: The kind and the axes of which the step has fewer than predicted.
        predicted: The predicted collectives.
        found: The collectives of the compiled step.
        cost: The predicted collectives without those of some parameters.
        paths: The paths of all parameters.
        unneeded: The gradients that are zero or equal on one device.
    """
    expected = amount(predicted, key)
    missing = expected.minus(amount(found, key))
    if not missing.bytes:
        return f"XLA merged {missing.count:,} with others, and moves the same bytes"
    if missing.bytes < 0:
        return f"XLA merged {missing.count:,} with others, and moves {format_bytes(-missing.bytes)} more"

    def moved_for(omitted: Collection[str]) -> Amount:
        return expected.minus(amount(cost(omitted), key))

    if unneeded.zero and moved_for(unneeded.zero).bytes == missing.bytes:
        return f"XLA removed those of {some(unneeded.zero)}: on one device, these gradients are zero"
    copies = [path for group in unneeded.equal for path in group[1:]]
    if copies and moved_for(copies).bytes == missing.bytes:
        groups = "; ".join(" and ".join(group) for group in unneeded.equal)
        return f"XLA merged gradients that are equal on one device: {groups}"
    text = f"XLA merged or removed some that move {format_bytes(missing.bytes)}"
    if len(paths) > MAX_PARAMETERS:
        return text
    same = [path for path in paths if moved_for([path]).bytes == missing.bytes]
    return f"{text}, as much as those of {some(same)}" if same else text
