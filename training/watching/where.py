"""Where in the code a thread is: the innermost function that is not of a library."""

import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = __name__.partition(".")[0]
LIBRARIES = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""How the files of Python and of installed packages begin."""


def where(thread: int) -> str:
    """The function that a thread is in: "measure (training/loop.py)"; of this package or of the user's own code.

    Args:
        thread: Its identifier, as `threading.get_ident` gives it.

    Returns:
        The function and its file; "" where there is no such thread, or all of it is of libraries.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        if name.partition(".")[0] == PACKAGE or not file.startswith(LIBRARIES):
            return f"{frame.f_code.co_name} ({_shown(file)})"
        frame = frame.f_back
    return ""


def _shown(file: str) -> str:
    path = Path(file)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
