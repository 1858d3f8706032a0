"""The libraries of modules: which library a module belongs to, how one is made, and the library's names of its arrays.

library      parameters                    state
Flax Linen   params/Dense_0/kernel         batch_stats/BatchNorm_0/mean     flax.traverse_util.flatten_dict, sep="/"
Flax NNX     first/kernel                  norm/mean                        nnx.to_flat_state, joined by "/"
Equinox      first/weight                  state/0, state/1, ...            jax.tree_util.keystr, simple; leaf by leaf
Keras        sequential/dense/kernel       sequential/norm/moving_mean      variable.path
"""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from types import FunctionType
from typing import Any

from ...parallel.model.user_options import find_parameters, takes_option, with_options

GROUPS = ("params", "model_state")
"""The parts of a train state that a library keeps in its modules."""


def own_name(library: str, path: str) -> str:
    """Returns the library's own name of an array.

    Args:
        library: `Model.library`; "" for other models.
        path: The path of an array below one of `GROUPS`: "params/Dense_0/kernel".
    """
    group, _, name = path.partition("/")
    if library == "flax.linen" and group == "params":
        return path
    if library == "equinox" and group == "model_state":
        return f"state/{name}"
    return name


def groups_of(library: str) -> tuple[str, ...]:
    """Returns the parts of a train state that an export of a model's parameters has."""
    return GROUPS if library else GROUPS[:1]


LIBRARIES = {"flax.linen": "Module", "flax.nnx": "Module", "equinox": "Module", "keras": "Layer"}
"""The library's module -> its base class. The file here has the last part of its name: linen.adapt_linen."""
MAKERS = {"rngs": "flax.nnx", "key": "equinox"}
"""The argument of a function that makes a module -> the module's library."""
NO_OPTIONS = ("parent", "name")
"""Fields that Linen adds to every module: its parent, and its name there."""


def library_of(module: Any, *, makers: bool = True) -> str | None:
    """Returns the library of a module, or None.

    Args:
        module: Any object.
        makers: A function of `rngs` or `key` counts as one that makes a module.
    """
    first = module[0] if isinstance(module, tuple) and module else module
    found = library_of_class(type(first))
    return MAKERS.get(_maker_argument(module)) if found is None and makers and callable(module) else found


def library_of_class(named: Any) -> str | None:
    """Returns the library of a class of modules; None for any other object."""
    if not isinstance(named, type):
        return None
    return next((library for library in LIBRARIES if _is_of(named, library)), None)


def makes_modules(named: Any, options: Mapping[str, Any]) -> bool:
    """Returns True if a class or function certainly creates modules.

    Args:
        named: A class of a library does, and a function that cannot be called without `rngs` or `key`.
        options: Its options; a function that gets such an argument from them does not.
    """
    argument = _maker_argument(named) if isinstance(named, type | FunctionType | partial) else ""
    if library_of_class(named) is not None or not argument or argument in options:
        return library_of_class(named) is not None
    return any(each.name == argument and each.default is each.empty for each in find_parameters(named).parameters)


def made_with(
    maker: Any, options: Mapping[str, Any], facts: Mapping[str, Any], what: str = "", *, beside: Sequence[str] = ()
) -> Any:
    """Calls a class or function that makes a module with its options, after checking them.

    Args:
        maker: A class of modules, or a function of the user's that returns one.
        options: The options in the config.
        facts: The sizes from the data; passed to a maker with a parameter of that name.
        what: The name of the maker, for messages: "model.name='mine:Net'".
        beside: Other keys of the config's section, for suggestions.

    Returns:
        A function of `rngs` or `key` if the maker takes one of these; else the module.

    Raises:
        UserError: Options are unknown or missing, or the maker raises an error.
    """
    argument, library = _maker_argument(maker), library_of_class(maker)
    hidden = NO_OPTIONS if library == "flax.linen" else ()
    later = (argument,) if argument else ()
    call = with_options(maker, options, facts, "model", what, later=later, hidden=hidden, beside=beside)
    if argument == "rngs":
        return lambda rngs: call(rngs=rngs)
    return (lambda key: call(key=key)) if argument else call()


def _maker_argument(function: Any) -> str:
    """Returns the argument of a maker for random keys, "rngs" or "key"; for a class, only that of its own library."""
    library = library_of_class(function)
    wanted = [name for name, of in MAKERS.items() if library in (None, of)]
    return next((name for name in wanted if takes_option(function, name)), "")


def _is_of(kind: type, library: str) -> bool:
    """Returns True if a class descends from a library's base class, without importing the library."""
    package = library.partition(".")[0]
    found = any(each.__module__.partition(".")[0] == package for each in kind.__mro__)
    return found and issubclass(kind, getattr(import_module(library), LIBRARIES[library]))
