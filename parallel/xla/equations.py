"""The operations of a traced program, those of the programs inside it included."""

from collections.abc import Iterator
from typing import Any


def inner_programs(equation: Any) -> list[Any]:
    """Returns the programs (jaxprs) that an operation runs, such as a loop's body or a function under `jit`."""
    values = equation.params.values()
    listed = (each for value in values for each in (value if isinstance(value, tuple | list) else (value,)))
    programs = (getattr(each, "jaxpr", each) for each in listed)
    return [each for each in programs if hasattr(each, "eqns")]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every operation (equation) of a program, each before those of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations(inner)
