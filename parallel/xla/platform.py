"""The tricks: what a program holds for one compiler, on which platforms, and what each was measured to gain.

A step is traced once for every platform. `by_platform` puts both ways into the trace; lowering keeps the one of its own
platform, and nothing of the other is in the text. So a trick is on for the platforms of its line here and off
everywhere else: on GPUs none is on. Each leaves its name in the program, as a name scope.

    order            simulated devices start collectives in an order that data alone can fix     `in_order.py`
    hop_in_groups    their collective-permute waits for stages that have no turn                 `neighbours.py`
    loops            XLA:CPU copies whatever passes through a conditional                        `skip.py`
    product          XLA:CPU takes more room to transpose the wider factor of a product          `product.py`
    weight_first     XLA:CPU puts off gradients that nothing waits for                           `product.py`

Facts about a backend that change no program stand where they count: `collectives.wire_bytes` (16-bit numbers on
the wire), `mesh/compat.py` (versions of JAX).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax

Result = TypeVar("Result")


class Trick(NamedTuple):
    """One trick.

    Attributes:
        platforms: Where it is on.
        gain: What it was measured to gain, and where; or what goes wrong without it.
    """

    platforms: tuple[str, ...]
    gain: str


TRICKS: dict[str, Trick] = {
    "order": Trick(("cpu",), "without it steps wait for ever or take each other's numbers: 8 devices on 2 cores"),
    "hop_in_groups": Trick(("cpu",), "without it a ring beside a pipeline waits for ever: 8 devices on 2 cores"),
    "loops": Trick(("cpu",), "1.6 ms a tick where a switch takes 14, half the memory: 2 cores, a buffer of 16 slots"),
    "product": Trick(("cpu",), "0.3 to 2 % of a step's memory: five cases of `make bench`, 2 cores"),
    "weight_first": Trick(("cpu",), "3.9 and 4.3 % of a step's memory: tensor 4 x data 2, fsdp 2 x tensor 4, 2 cores"),
}
"""A GPU needs none: it starts collectives in the order of the program, its permutes wait for their pairs alone, a
conditional copies nothing there, and its kernels take matrices in either order."""


def by_platform(trick: str, used: Callable[..., Result], otherwise: Callable[..., Result], *operands: Any) -> Result:
    """Runs a function with a trick where it is on, and one without it elsewhere.

    Args:
        trick: Its name in `TRICKS`.
        used: The function with it, of the operands.
        otherwise: The one without it, with results of the same types.
        *operands: Arrays, or trees of them.
    """

    def marked(*operands: Any) -> Result:
        with jax.named_scope(scope(trick)):
            return used(*operands)

    ways = dict.fromkeys(TRICKS[trick].platforms, marked)
    return lax.platform_dependent(*operands, default=otherwise, **ways) if ways else otherwise(*operands)


def scope(trick: str) -> str:
    """The name scope that a trick leaves in the program, as `lowered.as_text(debug_info=True)` shows it."""
    return f"trick.{trick}"
