"""Warns if a program that should compile once compiles again, and reports which argument changed."""

import threading
import warnings
from typing import Any

import jax
import jax.monitoring

from ...layouts.paths import leaves_with_paths

_COMPILED = "/jax/core/compile/backend_compile_duration"


class _Compilations(threading.local):
    """Counts compilations in this thread (a data or checkpoint thread compiles things of its own)."""

    count = 0


_compilations = _Compilations()
_listening = threading.Event()


def _listen() -> None:
    if _listening.is_set():
        return
    _listening.set()

    def on_event(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _COMPILED:
            _compilations.count += 1

    jax.monitoring.register_event_duration_secs_listener(on_event)


class RecompilationWatch:
    """Watches the calls of one program; costs two integer reads per call until something compiles."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: dict[str, str] | None = None
        _listen()

    @property
    def compilations(self) -> int:
        """The number of compilations in this thread; read it before a call."""
        return _compilations.count

    def check(self, before: int, *arguments: Any) -> None:
        """Warns if anything was compiled since `before`, in any call after the first.

        Args:
            before: `compilations` before the call.
            *arguments: The arguments of the call, which may be donated.
        """
        if self._first is None:
            self._first = _signature(arguments)
        elif _compilations.count != before:
            warnings.warn(self._message(_signature(arguments)), RuntimeWarning, stacklevel=3)

    def _message(self, now: dict[str, str]) -> str:
        first = self._first or {}
        changes = [f"{path}: {first.get(path, 'absent')} -> {now.get(path, 'absent')}" for path in {**first, **now}]
        changed = [line for line in changes if line.split(": ")[1].split(" -> ")[0] != line.split(" -> ")[1]]
        reason = "; ".join(changed[:5]) or "no argument changed shape, dtype or sharding"
        return f"{self._name} was compiled again, which costs as much as the first time: {reason}. Keep shapes fixed."


def _signature(arguments: tuple[Any, ...]) -> dict[str, str]:
    """Returns the shape, dtype and sharding of every array by path; works on donated arrays too."""
    return {path: _describe(leaf) for path, leaf in leaves_with_paths(arguments)}


def _describe(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    where = f" {sharding.spec}" if isinstance(sharding, jax.sharding.NamedSharding) else ""
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}{where}"
