"""Texts of JAX errors that the runtime recognizes, because JAX does not define exception types for them.

Each text is listed with the JAX versions that contain it. If another version changes a text, the user sees JAX's own
message instead of ours; nothing else changes.
"""

import re

UNTYPED = ("manual axis types", "varying manual axes")
"""A loop, a branch or an operation mixes values that vary over different axes: the first in most places, the second
in a loop whose carry changes. JAX 0.10.2 and 0.12.0."""

NOT_AN_ARRAY = "is not a valid JAX type"
"""A function returned something other than arrays. JAX 0.10.2 and 0.12.0."""

NESTED = "sdy.manual_computation"
"""A `jax.shard_map` inside another one cannot be lowered; this is its operation. JAX 0.10.2 and 0.12.0."""

_DIFFERS = re.compile(
    r"out_specs\S*?((?:\[[^\]]*\])*) is .*?only varying across mesh axes \{(.*?)\}.*?varying over \{(.*?)\}"
)
"""A result of `jax.shard_map` differs over axes that are not in its spec. JAX 0.10.2 and 0.12.0."""


def matches(error: BaseException, *texts: str) -> bool:
    """Returns whether an error message contains one of these texts."""
    return any(text in str(error) for text in texts)


def differing_result(error: BaseException) -> tuple[str, set[str]] | None:
    """Parses an error of `jax.shard_map` about a result that differs between devices on which it must be the same.

    Returns:
        The path of the first such result and the axes over which it differs; None for other errors.
    """
    found = _DIFFERS.search(str(error))
    if found is None:
        return None
    place, expected, varying = found.groups()
    path = "/".join(re.findall(r"\['?([^'\]]*)'?\]", place)[1:])
    return path, set(varying.split(",")) - set(expected.split(","))
