"""Errors of the user's own functions, told with the file and the line that they come from."""

import inspect
import linecache
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from .errors import UserError

RUNTIME = {"spmdkit", "jax", "jaxlib", "numpy", "optax", "orbax", "grain"}
"""Packages that are never the user's own, wherever they are installed."""
TOLD_OF_OURS = (KeyError, TypeError, ValueError)
"""What functions of spmdkit's own raise for arrays of other names, dtypes or shapes than they read."""
WORKER_HANDLER = ("handler", "signal_handling.py")
"""PyTorch's handler of signals and its file; it raises in whatever the main thread does once a loader's worker dies."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""As Keras writes in its messages, whatever they are printed to."""
MAX_CHARACTERS = 20_000
"""The limit on the text of another package's error: JAX's messages fit, a dumped program does not."""


class OwnCodeError(UserError):
    """An error of the user's code, told with its file and line: nothing around it has more to say."""


@contextmanager
def told_as_users(
    what: str,
    function: Any = None,
    error_class: type[UserError] = UserError,
    passes: Callable[[Exception], bool] = lambda error: False,
) -> Iterator[None]:
    """Turns any error of the user's code inside into one message with its file and line.

    Args:
        what: Names the code: "optimizer.name='mine:make'".
        function: What is called, for an error that no line of the user's raised.
        error_class: The class of the error that is raised in its place.
        passes: Tells errors that pass as they are.

    Raises:
        UserError: Of `error_class`, from the error. Some errors pass as they are: a UserError of a class of its own,
            one that no line of the user's led to, and an error that can only be a mistake in a function of spmdkit's
            own.
    """
    try:
        yield
    except Exception as error:
        if passes(error) or _passes(error, function):
            raise
        raise error_class(f"{what} fails {place_of(error, function)}: {text_of(error)}") from error


def _passes(error: Exception, function: Any) -> bool:
    """Whether an error says all there is to say, or is no error of the user's code."""
    if isinstance(error, UserError):
        return type(error) is not UserError or _users_frame(error) is None
    if any(_is_worker_handler(frame.f_code) for frame, _ in traceback.walk_tb(error.__traceback__)):
        return True
    return _is_ours(function) and _users_frame(error) is None and not isinstance(error, TOLD_OF_OURS)


def _is_worker_handler(code: CodeType) -> bool:
    return (code.co_name, Path(code.co_filename).name) == WORKER_HANDLER


def place_of(error: BaseException, function: Any = None) -> str:
    """Where the user's own code raised an error, as `in /a/file.py, line 3 (x = batch["images"])`.

    Where none of it is among the frames, the file of the package that did: `in keras/src/layers/layer.py, line 3`.

    Args:
        error: As it was caught.
        function: The user's function, for an error in calling it.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"in {error.filename}, line {error.lineno}"
    frame = _users_frame(error)
    if frame is None:
        return place_of_function(function)
    if _is_installed(frame.filename):
        return f"in {_below_packages(frame.filename)}, line {frame.lineno}"
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"in {frame.filename}, line {frame.lineno}{f' ({line})' if line else ''}"


def place_of_function(function: Any) -> str:
    """Where a function, or the `__init__` of a class, stands: `in /a/file.py, line 3`; else `in <its name>`."""
    plain = _plain(function)
    code = getattr(vars(plain).get("__init__") if isinstance(plain, type) else plain, "__code__", None)
    if code is None or code.co_filename.startswith("<"):
        return f"in {getattr(plain, '__name__', type(plain).__name__)}"
    return f"in {code.co_filename}, line {code.co_firstlineno}"


def text_of(error: BaseException) -> str:
    """The class and the text of an error; a UserError's message as it is."""
    if isinstance(error, UserError):
        return str(error)
    text = " ".join(COLOUR.sub("", str(error)).split())
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS].rsplit(' ', 1)[0]} ..."
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def accepts(function: Callable[..., Any], number: int) -> bool:
    """Whether a function can be called with so many positional arguments; True where nothing tells."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return False
    return True


def _users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame in the user's own files; else the innermost in another package than those of the runtime."""
    own: traceback.FrameSummary | None = None
    other: traceback.FrameSummary | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if name.split(".")[0] in RUNTIME or file.startswith("<frozen"):
            continue
        summary = traceback.FrameSummary(file, line, frame.f_code.co_name, lookup_line=False)
        if not _is_installed(file):
            own = summary
        elif not file.startswith(STANDARD):
            other = summary
    return own or other


def _is_ours(function: Any) -> bool:
    return str(getattr(_plain(function), "__module__", "")).split(".")[0] == "spmdkit"


STANDARD = sysconfig.get_paths()["stdlib"]
PACKAGES = {"site-packages", "dist-packages"}


def _is_installed(file: str) -> bool:
    return file.startswith(STANDARD) or bool(PACKAGES & set(Path(file).parts))


def _below_packages(file: str) -> str:
    """The name of a file from that of its package on."""
    parts = Path(file).parts
    first = max((place + 1 for place, part in enumerate(parts) if part in PACKAGES), default=0)
    return str(Path(*parts[first:]))


def is_of_package(error: BaseException) -> bool:
    """Whether no line of the user's own led to an error, but one of an installed package."""
    frame = _users_frame(error)
    return frame is not None and _is_installed(frame.filename)


def _plain(function: Any) -> Any:
    """The function behind partial applications, decorators and bound methods, and behind an object that is called."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "__func__", function)
    if hasattr(function, "__code__") or isinstance(function, type):
        return function
    called = vars(type(function)).get("__call__")
    return called if hasattr(called, "__code__") else function
