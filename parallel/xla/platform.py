"""The tricks: code for a specific compiler, the platforms that use it, and its measured gain.

A step is traced once for all platforms. `by_platform` puts both variants into the trace; lowering keeps the variant of
its own platform and removes the other. A trick is therefore used on the platforms listed here and on no others; GPUs
use none. In the program, a name scope shows the name of the trick.

    order            simulated devices order collectives by data dependencies only    `ordered_collectives.py`
    hop_in_groups    XLA:CPU's permute waits for stages that skip it                   `ring_hop.py`
    loops            XLA:CPU copies every buffer that passes through a conditional     `optional_turns.py`
    product          XLA:CPU needs more memory to transpose the wider factor           `product.py`
    weight_first     XLA:CPU postpones gradients that no other operation waits for     `product.py`

Other parts of a step are chosen when it is traced: `overlaps`, `crosses_hosts` and `overhead_of`. Everything that makes
the program of a platform is chosen here, so that tests can run the branches of GPUs on simulated devices, see
`branches_of_gpus`.

Facts about a backend that do not change the program are elsewhere: `collectives.wire_bytes` (16-bit numbers on the
wire), `mesh/compat.py` (versions of JAX).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax

from ...mesh.device_mesh import DeviceMesh

Result = TypeVar("Result")

SIMULATED = "cpu"
"""The platform of simulated devices."""
OVERLAPPING = ("gpu", "cuda", "rocm")
"""Platforms with asynchronous collectives."""


class _Branches(NamedTuple):
    """The branches that simulated devices take.

    Attributes:
        of_gpus: Whether they take those of GPUs.
        across_hosts: Whether all groups of devices count as devices of different hosts.
    """

    of_gpus: bool = False
    across_hosts: bool = False


_OWN = _Branches()
_branches: ContextVar[_Branches] = ContextVar("branches", default=_OWN)


@contextmanager
def branches_of_gpus(*, across_hosts: bool = False) -> Iterator[None]:
    """Makes simulated devices take the branches of GPUs, for tests: their numbers are compared without a GPU.

    Steps that are built, traced or compiled within this context are those of GPUs, except for the kernels of cuDNN and
    for the tricks without which simulated devices hang or compute wrong values (`Trick.is_required`).

    Args:
        across_hosts: Also the branches for devices in different hosts, such as `fsdp.exchanges`.
    """
    token = _branches.set(_Branches(True, across_hosts))
    try:
        yield
    finally:
        _branches.reset(token)


def overlaps(platform: str) -> bool:
    """Returns whether a platform has asynchronous collectives, which the step then runs beside products.

    There, `strategy.data.reduce: auto` sums gradients within backward: Llama-3 8B on data 16 x fsdp 8 H100s, 8,192 x 2
    positions, exposes 201 ms with one sum at the end (compiled, not run). The first and the last block run outside the
    loop over blocks (`blocks/ends.py`), and gradients may be exchanged between hosts (`fsdp.exchanges`).

    Args:
        platform: The platform of the step.
    """
    return _acting(platform) in OVERLAPPING


def crosses_hosts(mesh: DeviceMesh, axes: Sequence[str]) -> bool:
    """Returns whether the devices along some axes of a mesh are all in different hosts."""
    return _branches.get().across_hosts or mesh.has_one_per_host(axes)


def _acting(platform: str) -> str:
    """Returns the platform whose branches a platform takes."""
    return "gpu" if platform == SIMULATED and _branches.get().of_gpus else platform


def overhead_of(platform: str, elements: float) -> int:
    """Returns what a block of an expert's rows takes beyond the products of its rows, in rows; 0 if unknown.

    On GPUs: to add its gradients to those of the expert, 250 rows (Mixtral 8x7B on an H100, bfloat16: 0.58 ms, and 2.34
    us for the products of a row; JAX 0.10.2, November 2026), and 14 starts of products of 6 us, see `kernel_time.py`.

    Args:
        platform: The platform of the step.
        elements: The elements of a weight of one expert on a device.
    """
    return 250 + int(2e9 / elements) if _acting(platform) == "gpu" else 0


class Trick(NamedTuple):
    """One trick.

    Attributes:
        platforms: The platforms that use it.
        gain: Its measured gain and where it was measured, or what fails without it.
        is_required: Whether steps fail on these platforms without it.
    """

    platforms: tuple[str, ...]
    gain: str
    is_required: bool = False


TRICKS: dict[str, Trick] = {
    "order": Trick(
        ("cpu",), "without it, steps deadlock or exchange wrong values: 8 devices on 2 cores", is_required=True
    ),
    "hop_in_groups": Trick(
        ("cpu",), "without it, a ring with a pipeline deadlocks: 8 devices on 2 cores", is_required=True
    ),
    "loops": Trick(("cpu",), "1.6 ms a tick where a switch takes 14, half the memory: 2 cores, a buffer of 16 slots"),
    "product": Trick(("cpu",), "0.3 to 2 % of a step's memory: five cases of `make bench`, 2 cores"),
    "weight_first": Trick(("cpu",), "3.9 and 4.3 % of a step's memory: tensor 4 x data 2, fsdp 2 x tensor 4, 2 cores"),
}
"""The tricks by name. GPUs need none: they start collectives in program order, their permutes wait only for their
pairs, their conditionals copy nothing, and their kernels accept matrices in either order."""


def uses(trick: str, platform: str) -> bool:
    """Returns whether the step of a platform uses a trick.

    Args:
        trick: The name in `TRICKS`.
        platform: The platform of the step.
    """
    acting = platform if TRICKS[trick].is_required else _acting(platform)
    return acting in TRICKS[trick].platforms


def by_platform(trick: str, used: Callable[..., Result], otherwise: Callable[..., Result], *operands: Any) -> Result:
    """Runs the variant with a trick on the platforms that use it, and the variant without it on all others.

    Args:
        trick: The name in `TRICKS`.
        used: The function of the operands that uses the trick.
        otherwise: The function without the trick, with results of the same types.
        *operands: Arrays, or trees of arrays.
    """

    def marked(*operands: Any) -> Result:
        with jax.named_scope(scope(trick)):
            return used(*operands)

    ways: dict[str, Callable[..., Result]] = {}
    for platform in TRICKS[trick].platforms:
        ways[platform] = marked if uses(trick, platform) else otherwise
    return lax.platform_dependent(*operands, default=otherwise, **ways)


def scope(trick: str) -> str:
    """Returns the name scope of a trick, as `lowered.as_text(debug_info=True)` shows it."""
    return f"trick.{trick}"
