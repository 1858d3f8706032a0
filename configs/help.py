"""Reads the documentation of a dataclass's fields: the string literal under each of them.

    steps: int = 100
    \"\"\"Optimizer steps to train for.\"\"\"

Help stands in one place, beside the default, where an editor shows it; the command line reads it from there.
"""

import ast
import dataclasses
import inspect
import textwrap
from functools import cache


@cache
def field_help(cls: type) -> dict[str, str]:
    """Returns field name -> help, on one line each, for the fields that a dataclass and its bases document.

    Args:
        cls: A dataclass whose source can be read.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _own_help(base)
    return found


def _own_help(cls: type) -> dict[str, str]:
    """The help of the fields that a class itself declares."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    (definition,) = tree.body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = _literal(following)
            if text:
                found[statement.target.id] = " ".join(text.split())
    return found


def _literal(statement: ast.stmt) -> str | None:
    """Returns the text of a statement that is nothing but a string literal."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None
