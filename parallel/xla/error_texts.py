"""What JAX's errors say, as far as the runtime reads them: JAX gives these cases no exception type of their own.

Each text stands here once, with the versions of JAX in whose source (or message) it was found. With another version a
text may be another: nothing breaks then, but the user sees JAX's own words in place of ours.
"""

import re
from typing import NamedTuple

NO_MESH = "context mesh cannot be empty"
"""`jax.shard_map` was called without a mesh, where none is in force. JAX 0.10.2 and 0.12.0."""

UNTYPED = ("manual axis types", "varying manual axes")
"""A loop, a branch or an operation mixes values that vary over different axes: the first in most places, the second
in a loop whose carry changes. JAX 0.10.2 and 0.12.0."""

NO_ARRAY = "is not a valid JAX type"
"""A function returned something that is no array. JAX 0.10.2 and 0.12.0."""

NESTED = "sdy.manual_computation"
"""A `jax.shard_map` inside another one cannot be lowered: the operation that both become. JAX 0.10.2 and 0.12.0."""

_DIFFERS = re.compile(
    r"out_specs\S*?((?:\[[^\]]*\])*) is .*?only varying across mesh axes \{(.*?)\}.*?varying over \{(.*?)\}"
)
"""`jax.shard_map` finds that a result differs over axes that its spec does not name. JAX 0.10.2 and 0.12.0."""


class Differing(NamedTuple):
    """A result of `jax.shard_map` that differs between devices which have to hold the same.

    Attributes:
        path: Its path among the results.
        expected: The axes that it may vary over.
        found: Those that it varies over.
    """

    path: str
    expected: tuple[str, ...]
    found: tuple[str, ...]


def says(error: BaseException, *texts: str) -> bool:
    """Whether an error says one of these texts."""
    return any(text in str(error) for text in texts)


def differing_result(error: BaseException) -> Differing | None:
    """The first result of `jax.shard_map` that the error says varies over too many axes, if it says so."""
    found = _DIFFERS.search(str(error))
    if found is None:
        return None
    place, expected, varying = found.groups()
    path = "/".join(re.findall(r"\['?([^'\]]*)'?\]", place)[1:])
    return Differing(path, tuple(expected.split(",")), tuple(varying.split(",")))
