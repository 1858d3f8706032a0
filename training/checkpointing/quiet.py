"""What Orbax and TensorStore print of a failed save is left out: one message of this package says it."""

import logging
import os
import sys
from functools import cache
from typing import Any

from ..ending.exits import TRACEBACK_VARIABLE


@cache
def leave_errors_to_one_message() -> None:
    """What Orbax and TensorStore print of a failure, with tracebacks, would come before the message that says it.

    Orbax logs it. Where one of several reads or writes fails, it closes its event loop with the others still under way;
    each of these finds the loop closed, with a traceback that TensorStore hands to `sys.unraisablehook`.
    """
    if os.environ.get(TRACEBACK_VARIABLE, "0") != "0":
        return
    logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)
    # Of several tasks that fail, asyncio says of all but one that nobody asked how they ended.
    logging.getLogger("asyncio").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.getMessage())
    before = sys.unraisablehook

    def hook(raised: Any) -> None:
        if not (raised.exc_type is RuntimeError and str(raised.exc_value) == "Event loop is closed"):
            before(raised)

    sys.unraisablehook = hook
