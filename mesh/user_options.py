"""Options of a config section for the user's own function or class: all of them looked at before it is called.

Of `def make(width: int, depth=2)`:

    {width: 64}          make(width=64)
    {widht: 64}          widht is not an option, did you mean width? width has to be given
    {width: wide}        width must be a whole number

What no annotation says is told once the function has failed: that an option is of another type than its default.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import Parameter
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from .errors import UserError
from .near_miss import did_you_mean, nearest
from .user_errors import OwnCodeError, told_as_users

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
"""The types that are looked at, in words; of every other nothing is said."""
NAMED = {kind.__name__: kind for kind in (bool, int, float, str)} | {"None": type(None)}
"""The same by name, for annotations that are text."""
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Taken(NamedTuple):
    """What a function takes by name.

    Attributes:
        parameters: Those that have a name, in order.
        takes_any: Whether it takes options of any other name as well (`**options`).
    """

    parameters: tuple[Parameter, ...]
    takes_any: bool = False

    @property
    def names(self) -> list[str]:
        """The names, in order."""
        return [parameter.name for parameter in self.parameters]


def taken_by(function: Any) -> Taken:
    """What a function takes by name; a class what its `__init__` takes, and those it passes `**options` on to.

    Args:
        function: A function, a class, a partial application of one, or any object that is called. What a metaclass or
            `__new__` takes says nothing: those of Flax, Equinox and Keras take anything.

    Raises:
        TypeError: It is not called, or nothing tells.
        ValueError: Nothing tells, as of some functions that are built in.
    """
    if isinstance(function, partial):
        inner = taken_by(function.func)
        given = [each.replace(default=function.keywords.get(each.name, each.default)) for each in inner.parameters]
        return Taken(tuple(given[len(function.args) :]), inner.takes_any)
    if isinstance(function, type) and function.__init__ is not object.__init__:
        return _taken_by_class(function)
    return _taken(inspect.signature(function).parameters.values())


def _taken(parameters: Any) -> Taken:
    parameters = list(parameters)
    named = tuple(each for each in parameters if each.kind in BY_NAME)
    return Taken(named, any(each.kind is Parameter.VAR_KEYWORD for each in parameters))


def _taken_by_class(made: type) -> Taken:
    """What the `__init__` of a class takes, with what those above it take as long as they are passed `**options`."""
    found: dict[str, Parameter] = {}
    takes: list[Taken] = []
    for base in made.__mro__[:-1]:
        if "__init__" not in vars(base):
            continue
        takes.append(_taken(list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]))
        for each in takes[-1].parameters:  # what a class above needs, the class may give it
            found.setdefault(each.name, each if len(takes) == 1 else each.replace(default=None))
        if not takes[-1].takes_any:
            break
    return Taken(tuple(found.values()), takes[0].takes_any)


def takes_option(function: Any, name: str) -> bool:
    """Tells whether a function, or the `__init__` of a class, has a parameter of this name."""
    try:
        return name in taken_by(function).names
    except (TypeError, ValueError):
        return False


def call_with_options(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    offered: Mapping[str, Any],
    key: str,
    what: str = "",
    *,
    beside: Sequence[str] = (),
) -> Any:
    """Calls a user's function with the options of its config section.

    Args:
        function: Takes its options as keyword arguments.
        options: What the config gives; every one has to be taken.
        offered: What the run knows; given to a function that has a parameter of that name, unless the config gives it.
        key: The config section, for messages.
        what: Names the function, for messages: "model.name='mine:make'".
        beside: Other keys of the section, which may be what a name that is unknown here means.

    Returns:
        What the function returns.

    Raises:
        UserError: As `with_options`; or the function raises something, told with its file and line.
    """
    return with_options(function, options, offered, key, what, beside=beside)()


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
    """A user's function with the options of its config section, which are checked here.

    Args:
        function, options, offered, key, what, beside: As for `call_with_options`.
        later: Parameters that the runtime itself gives, each time it calls the result.
        hidden: Parameters that are no options.

    Returns:
        A function of the parameters `later`, by name.

    Raises:
        UserError: Options that it does not take, or of another type than it says, or parameters without a default that
            nobody gives: all of them.
    """
    taken = taken_by(function)
    taken = taken._replace(parameters=tuple(p for p in taken.parameters if p.name not in (*later, *hidden)))
    given = {name: value for name, value in offered.items() if name in taken.names and value is not None}
    arguments = given | dict(options)
    name = _name(function)
    problems = _unknown([] if taken.takes_any else options, taken.names, key, name, beside)
    problems += [problem for each in taken.parameters if (problem := _wrong_type(each, options, key, name))]
    lacking = [p.name for p in taken.parameters if p.default is p.empty and p.name not in arguments]
    meant = " ".join(["", *_not_named(taken, options, key)])
    problems += [f"{key}.{each} has to be given: {name} has no default for it.{meant}" for each in lacking]
    if problems:
        raise UserError("\n".join(problems))

    def call(**more: Any) -> Any:
        with _remarked(taken, options, key), told_as_users(what or f"{key}: {name}", function, OwnCodeError):
            return function(**more, **arguments)

    return call


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _unknown(options: Any, known: Sequence[str], key: str, function: str, beside: Sequence[str]) -> list[str]:
    """One problem for each option that a function does not take: the nearest that it does, and all of them."""
    problems = []
    for option in options:
        if option in known:
            continue
        near = did_you_mean(option, [*known, *beside], prefix=f"{key}.")
        listed = f" The options of {function} are {', '.join(known)}." if known else f" {function} has no options."
        problems.append(f"{key}.{option} is not an option.{near}{listed}")
    return problems


def _wrong_type(parameter: Parameter, options: Mapping[str, Any], key: str, function: str) -> str:
    """What is wrong with the type of an option that the config gives, where an annotation says what it has to be."""
    kinds = _kinds(parameter.annotation)
    if parameter.name not in options or not kinds or any(_is(options[parameter.name], kind) for kind in kinds):
        return ""
    wanted = " or ".join(WORDS[kind] for kind in kinds)
    hint = " | ".join("None" if each is type(None) else each.__name__ for each in kinds)
    given = f"{key}.{parameter.name}={_shown(options[parameter.name])}"
    return f"{given} must be {wanted}: {function} takes {parameter.name}: {hint}."


def _kinds(annotation: Any) -> list[type]:
    """The plain types that an annotation allows; none where it says nothing, or anything else besides."""
    if isinstance(annotation, str):
        kinds: list[Any] = [NAMED.get(part.strip()) for part in annotation.split("|")]
    elif get_origin(annotation) in (Union, UnionType):
        kinds = list(get_args(annotation))
    else:
        kinds = [annotation]
    return kinds if all(isinstance(kind, type) and kind in WORDS for kind in kinds) else []


def _is(value: Any, kind: type) -> bool:
    """Whether a value of YAML is of a type: 3 is a number too, 3.0 a whole number too, and true is neither."""
    if kind in (int, float) and not isinstance(value, bool):
        return isinstance(value, int) or (isinstance(value, float) and (kind is float or value.is_integer()))
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


@contextmanager
def _remarked(taken: Taken, options: Mapping[str, Any], key: str) -> Iterator[None]:
    """Adds to an error of the function inside what is doubtful about its options: other names, other types."""
    try:
        yield
    except OwnCodeError as error:
        remarks = [*_not_named(taken, options, key), *_unlike_default(taken, options, key)]
        if not remarks:
            raise
        raise OwnCodeError(" ".join([f"{str(error).rstrip('.')}.", *remarks])) from error.__cause__


def _not_named(taken: Taken, options: Mapping[str, Any], key: str) -> list[str]:
    """Remarks about options that a function takes by `**options` alone, and that are near to one that it names."""
    others = [option for option in options if option not in taken.names] if taken.takes_any else []
    near = {option: nearest(option, taken.names) for option in others}
    return [f"Is {key}.{option} meant to be {key}.{found[0]}?" for option, found in near.items() if found]


def _unlike_default(taken: Taken, options: Mapping[str, Any], key: str) -> list[str]:
    """Remarks about options of another type than their default has, where no annotation says what they have to be."""
    remarks = []
    for name, default in ((each.name, each.default) for each in taken.parameters if each.name in options):
        value = options[name]
        if default is not None and type(default) in WORDS and not _is(value, type(default)):
            given = f"{key}.{name}={_shown(value)} is {_word(value)}"
            remarks.append(f"{given}, and its default, {_shown(default)}, {_word(default)}.")
    return remarks


def _word(value: Any) -> str:
    return WORDS.get(type(value), f"a {type(value).__name__}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
