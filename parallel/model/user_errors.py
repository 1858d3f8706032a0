"""Errors of the user's own functions, reported with the file and line of their origin."""

import inspect
import linecache
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ...mesh.errors import UserError

RUNTIME = {"spmdkit", "jax", "jaxlib", "numpy", "optax", "orbax", "grain"}
"""Packages that are never the user's own code."""
DATA_ERRORS = (KeyError, TypeError, ValueError)
"""Errors of spmdkit's own functions for arrays with other names, dtypes or shapes than expected."""
WORKER_HANDLER = ("handler", "signal_handling.py")
"""PyTorch's signal handler and its file; it raises anywhere in the main thread after a loader's worker dies."""
COLOR = re.compile(r"\x1b\[[0-9;]*m")
"""Color codes, which Keras always writes into its messages."""
NEXT = "__next__"
PASSED_ON = "reraise"
"""PyTorch's function that raises an error of a worker process in the process that reads."""
ENDED = "StopIteration: the iterator that is read there has ended. Give next() a default, or make a new iterator"

Item = TypeVar("Item")


class OwnCodeError(UserError):
    """An error of the user's code with its file and line, which callers pass on unchanged."""


@contextmanager
def as_user_error(
    what: str,
    function: Any = None,
    error_class: type[UserError] = UserError,
    passes: Callable[[Exception], bool] = lambda error: False,
) -> Iterator[None]:
    """Turns an error of the user's code in a `with` block into one message with its file and line.

    Args:
        what: The code, for the message: "optimizer.name='mine:make'".
        function: The called function, for an error outside the user's code.
        error_class: The class of the raised error.
        passes: Returns True for errors that are raised unchanged.

    Raises:
        UserError: An `error_class` whose cause is the error. Subclasses of UserError, UserErrors from outside the
            user's code, and errors that can only be bugs in spmdkit's own functions are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if passes(error) or _passes(error, function):
            raise
        raise error_class(f"{what} fails {locate_error(error, function)}: {describe_error(error)}") from error


def _passes(error: Exception, function: Any) -> bool:
    """Returns True if an error is complete, or not caused by the user's code."""
    if isinstance(error, UserError):
        return type(error) is not UserError or _users_frame(error) is None
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any((code.co_name, Path(code.co_filename).name) == WORKER_HANDLER for code in codes):
        return True
    is_ours = str(getattr(_plain(function), "__module__", "")).split(".")[0] == "spmdkit"
    return is_ours and _users_frame(error) is None and not isinstance(error, DATA_ERRORS)


def is_no_end(error: Exception) -> bool:
    """Returns True for every error but StopIteration: `passes` of `as_user_error` for code that a loop calls.

    In a loop or an iterator, a StopIteration that the user's code lets through, such as that of a bare `next()`, would
    end the loop without an error.
    """
    return not isinstance(error, StopIteration)


def user_items(
    what: str, make: Callable[[], Iterable[Item]], passes: Callable[[Exception], bool] = is_no_end
) -> Iterator[Item]:
    """Yields the items of the user's own iterable, and never takes an error for its end.

    Args:
        what: The code, for the message: "reading the stream".
        make: Returns the iterable; called once.
        passes: Returns True for errors that are raised unchanged.

    Raises:
        UserError: Code that the iterator calls raises StopIteration, or another error that `passes` does not let
            through.
    """
    items: Iterator[Item] | None = None
    while True:
        with as_user_error(what, passes=passes):
            if items is None:
                items = iter(make())
            try:
                item = next(items)
            except StopIteration as error:
                if _is_end(error):
                    return
                raise
        yield item


def _is_end(error: StopIteration) -> bool:
    """Returns True if an iterator itself has raised a StopIteration, not a function of the user that it calls.

    Iterators in C, such as `map`, have no frames. So the first frame of the user's code is that of the user's own
    iterator, or of a function that an iterator of Python or of a library calls for an item.
    """
    for frame, _ in list(traceback.walk_tb(error.__traceback__))[1:]:
        function = frame.f_code.co_name
        if function == PASSED_ON:
            return False
        if not _is_runtime(frame) and not _is_installed(frame.f_code.co_filename):
            return function == NEXT
    return True


def explain_exit(error: SystemExit, command: str) -> UserError:
    """Returns the error for the user's code that exits the program with code 0 before a command is done.

    Args:
        error: The caught exit.
        command: The name of the command.
    """
    return UserError(
        f"`spmdkit {command}` is not done, but code that it calls exits the program with code 0 {locate_error(error)}. "
        "Raise an error, or return; a callback ends a run with run.stop(reason)."
    )


def locate_error(error: BaseException, function: Any = None) -> str:
    """Returns the location of an error in the user's code: `in /a/file.py, line 3 (x = batch["images"])`.

    If there is no frame in the user's code, returns the file of a package: `in keras/src/layers/layer.py, line 3`.

    Args:
        error: The caught error.
        function: The user's function, for an error in calling it.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"in {error.filename}, line {error.lineno}"
    frame = _users_frame(error)
    if frame is None:
        return locate_function(function)
    if _is_installed(frame.filename):
        return f"in {_below_packages(frame.filename)}, line {frame.lineno}"
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"in {frame.filename}, line {frame.lineno}{f' ({line})' if line else ''}"


def locate_function(function: Any) -> str:
    """Returns the location of a function, or of a class's `__init__`: `in /a/file.py, line 3`, or `in <name>`."""
    plain = _plain(function)
    code = getattr(vars(plain).get("__init__") if isinstance(plain, type) else plain, "__code__", None)
    if code is None or code.co_filename.startswith("<"):
        return f"in {getattr(plain, '__name__', type(plain).__name__)}"
    return f"in {code.co_filename}, line {code.co_firstlineno}"


def describe_error(error: BaseException) -> str:
    """Returns the class and the message of an error; of a UserError only the message."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, StopIteration) and not error.args:
        return ENDED
    text = " ".join(COLOR.sub("", str(error)).split())
    return f"{type(error).__name__}{f': {text}' if text else ''}"


def accepts(function: Callable[..., Any], number: int) -> bool:
    """Returns True if a function accepts this number of positional arguments, or if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    with suppress(TypeError):
        signature.bind(*[None] * number)
        return True
    return False


def _users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost frame in the user's files or, if there is none, in a package outside the runtime."""
    own: traceback.FrameSummary | None = None
    other: traceback.FrameSummary | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if _is_runtime(frame) or file.startswith("<frozen"):
            continue
        summary = traceback.FrameSummary(file, line, frame.f_code.co_name, lookup_line=False)
        if not _is_installed(file):
            own = summary
        elif not file.startswith(STANDARD):
            other = summary
    return own or other


def _is_runtime(frame: FrameType) -> bool:
    """Returns True if a frame is of a package that is never the user's own code."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.split(".")[0] in RUNTIME


STANDARD = sysconfig.get_paths()["stdlib"]
PACKAGES = {"site-packages", "dist-packages"}


def _is_installed(file: str) -> bool:
    return file.startswith(STANDARD) or bool(PACKAGES & set(Path(file).parts))


def _below_packages(file: str) -> str:
    """Returns the part of a path from its package on."""
    parts = Path(file).parts
    first = max((place + 1 for place, part in enumerate(parts) if part in PACKAGES), default=0)
    return str(Path(*parts[first:]))


def _plain(function: Any) -> Any:
    """Returns the function behind partial applications, decorators, bound methods and callable objects."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "__func__", function)
    if hasattr(function, "__code__") or isinstance(function, type):
        return function
    called = vars(type(function)).get("__call__")
    return called if hasattr(called, "__code__") else function
