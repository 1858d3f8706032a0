"""The tricks: code for a specific compiler, the platforms that use it, and its measured gain.

A step is traced once for all platforms. `by_platform` puts both variants into the trace; lowering keeps the variant of
its own platform and removes the other. A trick is therefore used on the platforms listed here and on no others; GPUs
use none. In the program, a name scope shows the name of the trick.

    order            simulated devices order collectives by data dependencies only    `ordered_collectives.py`
    hop_in_groups    XLA:CPU's permute waits for stages that skip it                   `ring_hop.py`
    loops            XLA:CPU copies every buffer that passes through a conditional     `optional_turns.py`
    product          XLA:CPU needs more memory to transpose the wider factor           `product.py`
    weight_first     XLA:CPU postpones gradients that no other operation waits for     `product.py`

Facts about a backend that do not change the program are elsewhere: `collectives.wire_bytes` (16-bit numbers on the
wire), `mesh/compat.py` (versions of JAX).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax

Result = TypeVar("Result")


OVERLAPPING = ("gpu", "cuda", "rocm")
"""Platforms with asynchronous collectives, where gradients may be exchanged between hosts
(`fsdp.exchanges`), and where `strategy.data.reduce: auto` sums gradients within backward: Llama-3
8B on data 16 x fsdp 8 H100s, 8,192 x 2 positions, exposes 201 ms with one sum at the end (compiled, not run)."""


def overhead_of(platform: str, elements: float) -> int:
    """Returns what a block of an expert's rows takes beyond the products of its rows, in rows; 0 if unknown.

    On GPUs: to add its gradients to those of the expert, 250 rows (Mixtral 8x7B on an H100, bfloat16: 0.58 ms, and 2.34
    us for the products of a row; JAX 0.10.2, November 2026), and 14 starts of products of 6 us, see `kernel_time.py`.

    Args:
        platform: The platform of the step.
        elements: The elements of a weight of one expert on a device.
    """
    return 250 + int(2e9 / elements) if platform == "gpu" else 0


class Trick(NamedTuple):
    """One trick.

    Attributes:
        platforms: The platforms that use it.
        gain: Its measured gain and where it was measured, or what fails without it.
    """

    platforms: tuple[str, ...]
    gain: str


TRICKS: dict[str, Trick] = {
    "order": Trick(("cpu",), "without it, steps deadlock or exchange wrong values: 8 devices on 2 cores"),
    "hop_in_groups": Trick(("cpu",), "without it, a ring with a pipeline deadlocks: 8 devices on 2 cores"),
    "loops": Trick(("cpu",), "1.6 ms a tick where a switch takes 14, half the memory: 2 cores, a buffer of 16 slots"),
    "product": Trick(("cpu",), "0.3 to 2 % of a step's memory: five cases of `make bench`, 2 cores"),
    "weight_first": Trick(("cpu",), "3.9 and 4.3 % of a step's memory: tensor 4 x data 2, fsdp 2 x tensor 4, 2 cores"),
}
"""The tricks by name. GPUs need none: they start collectives in program order, their permutes wait only for their
pairs, their conditionals copy nothing, and their kernels accept matrices in either order."""


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

    ways = dict.fromkeys(TRICKS[trick].platforms, marked)
    return lax.platform_dependent(*operands, default=otherwise, **ways) if ways else otherwise(*operands)


def scope(trick: str) -> str:
    """Returns the name scope of a trick, as `lowered.as_text(debug_info=True)` shows it."""
    return f"trick.{trick}"
