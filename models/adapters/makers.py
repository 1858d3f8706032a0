"""Whose a module is, and what makes one: a class of its library, or a function of `rngs` or `key`."""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import Parameter
from types import FunctionType
from typing import Any

from ...mesh.errors import UserError
from ...mesh.user_options import taken_by, takes_option, with_options

LIBRARIES = {
    "flax.linen": ("Module", "linen", "adapt_linen"),
    "flax.nnx": ("Module", "nnx", "adapt_nnx"),
    "equinox": ("Module", "equinox", "adapt_equinox"),
    "keras": ("Layer", "keras", "adapt_keras"),
}
"""The library's module -> its base class, the file here and the function in it. A further library is one file and one
line."""
MAKERS = {"rngs": "flax.nnx", "key": "equinox"}
"""The argument by which a function that makes a module tells whose it is."""
KEYS = ("rng", "rngs", "key", "keys", "rng_key", "prng_key", "random_key")
"""What arguments for random keys are called."""
NO_OPTIONS = ("parent", "name")
"""Fields that Linen adds to every module: what it is in, and what it is called there."""

NOTHING: Mapping[str, Any] = {}


def library_of(module: Any, *, makers: bool = True) -> str | None:
    """The library of a module; None where it is of none.

    Args:
        module: Anything.
        makers: Also take a function of `rngs` or `key` for one that makes a module.
    """
    values = module if isinstance(module, tuple) else (module,)
    for library in LIBRARIES:
        if any(_is_of(type(value), library) for value in values[:1]):
            return library
    return MAKERS.get(_maker_argument(module)) if makers and callable(module) else None


def library_of_class(named: Any) -> str | None:
    """The library whose modules a class makes; None of anything else."""
    if not isinstance(named, type):
        return None
    return next((library for library in LIBRARIES if _is_of(named, library)), None)


def makes_modules(named: Any, options: Mapping[str, Any] = NOTHING) -> bool:
    """Tells whether a class or function can only be one that makes modules.

    Args:
        named: A class of a library is one, and a function that cannot be called without `rngs` or `key`.
        options: What it is given; what gives it such an argument has other plans.
    """
    argument = _maker_argument(named) if isinstance(named, type | FunctionType | partial) else ""
    required = any(each.default is each.empty for each in _parameters(named) if each.name == argument)
    return library_of_class(named) is not None or bool(argument and required and argument not in options)


def made_with(
    maker: Any,
    options: Mapping[str, Any],
    facts: Mapping[str, Any] = NOTHING,
    *,
    what: str = "",
    beside: Sequence[str] = (),
) -> Any:
    """A class or function that makes a module, with its options checked and given.

    Args:
        maker: A class of modules, or any function of the user's that returns one.
        options: What the config gives for it.
        facts: What the data says of its sizes; given to a maker that has a parameter of that name.
        what: Names the maker, for messages: "model.name='mine:Net'".
        beside: Other keys of the config's section, which an unknown option may mean.

    Returns:
        A function of `rngs` or `key` where the maker takes one of these; else what it makes.

    Raises:
        UserError: Options that it does not take, or that are missing; or it raises something.
    """
    argument, library = _maker_argument(maker), library_of_class(maker)
    hidden = NO_OPTIONS if library == "flax.linen" else ()
    later = (argument,) if argument else ()
    try:
        call = with_options(maker, options, facts, "model", what, later=later, hidden=hidden, beside=beside)
    except UserError as error:
        raise UserError(f"{error}{_of_keys(maker, library)}") from None
    if argument == "rngs":
        return lambda rngs: call(rngs=rngs)
    return (lambda key: call(key=key)) if argument else call()


def _of_keys(maker: Any, library: str | None) -> str:
    """What to say of a class that wants its random keys under another name than its library gives them."""
    wanted = next((name for name, of in MAKERS.items() if of == library), "")
    others = [each.name for each in _parameters(maker) if each.default is each.empty and each.name in KEYS]
    if not wanted or not others or _maker_argument(maker):
        return ""
    return f" A class of {library} gets its random keys in an argument {wanted}: rename {others[0]}."


def _maker_argument(function: Any) -> str:
    """By which argument a maker draws, "rngs" or "key"; of a class of modules only that of its own library."""
    library = library_of_class(function)
    wanted = [name for name, of in MAKERS.items() if library in (None, of)]
    return next((name for name in wanted if takes_option(function, name)), "")


def _parameters(function: Any) -> tuple[Parameter, ...]:
    try:
        return taken_by(function).parameters
    except (TypeError, ValueError):
        return ()


def _is_of(kind: type, library: str) -> bool:
    """Whether a class descends from a library's base class, without importing the library."""
    package = library.partition(".")[0]
    found = any(each.__module__.partition(".")[0] == package for each in kind.__mro__)
    return found and issubclass(kind, getattr(import_module(library), LIBRARIES[library][0]))
