"""Checks the options of a config section before they are passed to the user's own function or class.

For `def make(width: int, depth=2)`:

    {width: 64}          make(width=64)
    {widht: 64}          widht is not an option of make, did you mean width? width is required
    {width: wide}        width must be an integer
    {width: "64"}        width is text in quotes; without an annotation too, unless its default is text
"""

import inspect
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from ...mesh.errors import raise_problems, unknown_options
from .user_errors import OwnCodeError, as_user_error

TYPE_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", type(None): "null"}
"""The types that are checked."""
NAMED = {kind.__name__: kind for kind in (bool, int, float, str)} | {"None": type(None)}
"""The same by name, for annotations that are strings."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
"""Text that is a number without quotes."""
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Signature(NamedTuple):
    """The keyword parameters of a function.

    Attributes:
        parameters: The named parameters, in order.
        takes_any: True if the function also takes `**options`.
    """

    parameters: tuple[Parameter, ...]
    takes_any: bool

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in order."""
        return [parameter.name for parameter in self.parameters]


def find_parameters(function: Any) -> Signature:
    """Returns the keyword parameters of a function; of a class, those of its `__init__` and of inherited ones.

    Args:
        function: A function, a class, a partial application of one, or any callable object. Metaclasses and `__new__`
            are ignored: those of Flax, Equinox and Keras accept anything.

    Raises:
        TypeError, ValueError: The signature is unknown, as for some built-in functions.
    """
    if isinstance(function, partial):
        inner = find_parameters(function.func)
        given = [each.replace(default=function.keywords.get(each.name, each.default)) for each in inner.parameters]
        return Signature(tuple(given[len(function.args) :]), inner.takes_any)
    if isinstance(function, type) and function.__init__ is not object.__init__:
        return _taken_by_class(function)
    return _taken(inspect.signature(function).parameters.values())


def _taken(parameters: Any) -> Signature:
    parameters = list(parameters)
    named = tuple(each for each in parameters if each.kind in BY_NAME)
    return Signature(named, any(each.kind is Parameter.VAR_KEYWORD for each in parameters))


def _taken_by_class(made: type) -> Signature:
    """Returns the parameters of `__init__` and, while each one takes `**options`, those of the base classes."""
    found: dict[str, Parameter] = {}
    takes: list[Signature] = []
    for base in made.__mro__[:-1]:
        if "__init__" not in vars(base):
            continue
        takes.append(_taken(list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]))
        for each in takes[-1].parameters:  # the class itself may pass what a base class requires
            found.setdefault(each.name, each if len(takes) == 1 else each.replace(default=None))
        if not takes[-1].takes_any:
            break
    return Signature(tuple(found.values()), takes[0].takes_any)


def takes_option(function: Any, name: str) -> bool:
    """Returns True if a function, or the `__init__` of a class, has a parameter of this name."""
    try:
        return name in find_parameters(function).names
    except (TypeError, ValueError):
        return False


def with_options(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    offered: Mapping[str, Any],
    key: str,
    what: str = "",
    *,
    later: Sequence[str] = (),
    hidden: Sequence[str] = (),
    beside: Sequence[str] = (),
) -> Callable[..., Any]:
    """Returns a user's function with the options of its config section, after checking them.

    Args:
        function: The function; its options are keyword arguments.
        options: The options in the config; each must be a parameter.
        offered: Values of the run, passed to parameters of that name unless the config sets them.
        key: The config section, for messages.
        what: The function, for messages: "model.name='mine:make'".
        later: Parameters that the runtime passes with each call.
        hidden: Parameters that are not options.
        beside: Other keys of the section, proposed for unknown options.

    Returns:
        A function of the parameters `later`, by name; if it fails, it raises a UserError with the file and line.

    Raises:
        UserError: Options are unknown, of the wrong type, or missing; the message lists all of them.
    """
    taken = find_parameters(function)
    taken = taken._replace(parameters=tuple(p for p in taken.parameters if p.name not in (*later, *hidden)))
    given = {name: value for name, value in offered.items() if name in taken.names and value is not None}
    arguments = given | dict(options)
    name = _name(function)
    unknown = [] if taken.takes_any else [option for option in options if option not in taken.names]
    problems = unknown_options(unknown, [*taken.names, *beside], key, of=name)
    problems += [problem for each in taken.parameters if (problem := _type_problem(each, options, key, name))]
    missing = [p.name for p in taken.parameters if p.default is p.empty and p.name not in arguments]
    problems += [f"{key}.{each} is required: {name} lacks a default for it." for each in missing]
    raise_problems(problems)

    def call(**more: Any) -> Any:
        with as_user_error(what or f"{key}: {name}", function, OwnCodeError):
            return function(**more, **arguments)

    return call


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _type_problem(parameter: Parameter, options: Mapping[str, Any], key: str, function: str) -> str:
    """Returns the problem of an option with another type than the parameter's annotation, or ""."""
    kinds = _plain_types(parameter.annotation)
    quoted = _quoted_number(parameter, options, key, function)
    if quoted:
        return quoted
    if parameter.name not in options or not kinds or any(_is(options[parameter.name], kind) for kind in kinds):
        return ""
    wanted, value = " or ".join(TYPE_NAMES[kind] for kind in kinds), options[parameter.name]
    hint = " | ".join("None" if each is type(None) else each.__name__ for each in kinds)
    kind = TYPE_NAMES.get(type(value), f"a {type(value).__name__}").partition(" ")[2]
    got = f"{reprlib.repr(value)} ({kind})"
    return f"{key}.{parameter.name} must be {wanted}, got {got}: {function} takes {parameter.name}: {hint}."


def _quoted_number(parameter: Parameter, options: Mapping[str, Any], key: str, function: str) -> str:
    """Returns the problem of a number in quotes for a parameter that does not say that it takes text, or ""."""
    value = options.get(parameter.name)
    takes_text = parameter.annotation is not parameter.empty or isinstance(parameter.default, str)
    if takes_text or not isinstance(value, str) or not NUMBER.fullmatch(value):
        return ""
    return (
        f"{key}.{parameter.name} is the text {value!r}, because it is in quotes. Remove them to pass a number; if "
        f"{function} takes text, annotate it: {parameter.name}: str."
    )


def _plain_types(annotation: Any) -> list[type]:
    """Returns the types of an annotation, if all of them are in TYPE_NAMES."""
    if isinstance(annotation, str):
        kinds: list[Any] = [NAMED.get(part.strip()) for part in annotation.split("|")]
    elif get_origin(annotation) in (Union, UnionType):
        kinds = list(get_args(annotation))
    else:
        kinds = [annotation]
    return kinds if all(isinstance(kind, type) and kind in TYPE_NAMES for kind in kinds) else []


def _is(value: Any, kind: type) -> bool:
    """Returns True if a YAML value is of a type: 3 is also a number, 3.0 also an integer, and true is neither."""
    if isinstance(value, bool):
        return kind is bool
    whole = isinstance(value, float) and value.is_integer()
    return isinstance(value, kind) or (kind is int and whole) or (kind is float and isinstance(value, int))
