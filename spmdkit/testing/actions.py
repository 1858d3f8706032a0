"""What each kind of fault does to the process it happens in."""

# pyright: reportMissingImports=false

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from .damage import damage, newest
from .faults import Fault, Moment

FOR_EVER = 100_000
"""Seconds."""


class InjectedFault(RuntimeError):
    """Raised by a fault of kind raise."""


def _kill(fault: Fault, moment: Moment) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _abort(fault: Fault, moment: Moment) -> None:
    os.abort()


def _segv(fault: Fault, moment: Moment) -> None:
    ctypes.string_at(0)


def _exit(fault: Fault, moment: Moment) -> None:
    os._exit(fault.code)


def _raise(fault: Fault, moment: Moment) -> None:
    if fault.error:
        number = getattr(errno, fault.error)
        raise OSError(number, os.strerror(number), f"injected: {fault}")
    raise InjectedFault(f"injected: {fault}")


def _hang(fault: Fault, moment: Moment) -> None:
    time.sleep(FOR_EVER)


def _hold(fault: Fault, moment: Moment) -> None:
    ctypes.PyDLL(None).sleep(FOR_EVER)  # PyDLL, unlike CDLL, keeps Python's lock


def _stop(fault: Fault, moment: Moment) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _signal(fault: Fault, moment: Moment) -> None:
    for number, name in enumerate(fault.signals):
        if number:
            time.sleep(fault.seconds)
        os.kill(os.getpid(), getattr(signal, name))


def _sleep(fault: Fault, moment: Moment) -> None:
    time.sleep(fault.seconds)


def _skip(fault: Fault, moment: Moment) -> None:
    moment.skipped = True


def _nan(fault: Fault, moment: Moment) -> None:
    """The first element, on the first device of this process, of an input that is a float, or else of the weights."""
    import jax.numpy as jnp

    floats = [name for name, leaf in moment.batch.items() if jnp.issubdtype(leaf.dtype, jnp.floating)]
    name = min(floats, key=lambda each: (each == "weights", each))

    def spoil(piece: Any) -> None:
        piece.reshape(-1)[0] = float("nan")

    moment.batch = {**moment.batch, name: with_piece_changed(moment.batch[name], 0, spoil)}


def _flip(fault: Fault, moment: Moment) -> None:
    """One bit of an element of a parameter, in the copy or part of it that one device holds."""
    import jax
    import numpy as np

    from ..layouts.paths import leaves_with_paths

    paths = [path for path, leaf in leaves_with_paths(moment.state.params) if leaf.size and leaf.dtype.itemsize == 4]
    chosen = next(path for path in paths if fault.parameter in path)

    def spoil(piece: Any) -> None:
        piece.reshape(-1).view(np.uint32)[fault.element] ^= np.uint32(1 << fault.bit)

    leaves, structure = jax.tree.flatten(moment.state.params)
    names = [path for path, _ in leaves_with_paths(moment.state.params)]
    leaves[names.index(chosen)] = with_piece_changed(leaves[names.index(chosen)], fault.device, spoil)
    moment.state = moment.state._replace(params=jax.tree.unflatten(structure, leaves))


def _damage(fault: Fault, moment: Moment) -> None:
    folder = newest(moment.checkpoints) if moment.checkpoints else None
    if folder is not None:
        damage(folder, fault.how)


ACTIONS: dict[str, Callable[[Fault, Moment], None]] = {
    "kill": _kill,
    "abort": _abort,
    "segv": _segv,
    "exit": _exit,
    "raise": _raise,
    "hang": _hang,
    "hold": _hold,
    "stop": _stop,
    "signal": _signal,
    "pause": _sleep,
    "slow": _sleep,
    "skip": _skip,
    "nan": _nan,
    "flip": _flip,
    "damage": _damage,
}
"""By kind."""


def with_piece_changed(array: Any, device: int, change: Callable[[Any], None]) -> Any:
    """A global array of which one device holds something else; no other process is asked.

    Args:
        array: A `jax.Array` on any mesh.
        device: Which device of this process, from 0.
        change: Changes a NumPy copy of what that device holds.
    """
    import jax
    import numpy as np

    pieces = [shard.data for shard in array.addressable_shards]
    changed = np.array(pieces[device])
    change(changed)
    pieces[device] = jax.device_put(changed, array.addressable_shards[device].device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)
