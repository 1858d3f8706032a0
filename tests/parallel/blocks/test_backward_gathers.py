"""The parameters that backward gathers again, listed by hand for a block with biases."""

from dataclasses import replace

import jax
import pytest
from spmdkit.models.frozen import freeze, frozen_paths
from spmdkit.parallel import FSDPConfig, lay_out
from spmdkit.parallel.blocks.backward_gathers import find_backward_gathers
from support import toy

FSDP = {"fsdp": FSDPConfig(size=2, floor_bytes=0)}
AHEAD = {"fsdp": FSDPConfig(size=2, floor_bytes=0, prefetch=1)}
IN_STAGES = FSDP | {"pipe": {"size": 2, "layers": [2, 1]}}
MATRICES = {"scale", "up", "down"}


def reads(strategy=FSDP, remat="none", frozen=(), **changes):
    """Returns the names that are gathered again: in the inner blocks, in the first."""
    model = freeze(replace(toy.BIASED_MODEL, **changes), frozen)
    shapes = jax.eval_shape(toy.biased_init, jax.random.key(0))
    devices = toy.devices(4 if "pipe" in strategy else 2)
    plan = lay_out(model, strategy, devices=devices, frozen=frozen_paths(frozen, shapes))
    rows = {name: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype) for name, leaf in toy.batch(0).items()}
    found = find_backward_gathers(model, toy.with_options(plan, remat=remat), rows)
    assert all(path.startswith("blocks/") for paths in found for path in paths)
    return tuple({path.removeprefix("blocks/") for path in paths} for paths in found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, MATRICES),
        ({"remat": "full"}, MATRICES | {"b_up"}),  # hidden is made again, and b is added after all products
        ({"strategy": IN_STAGES}, MATRICES),
        ({"strategy": IN_STAGES, "remat": "full"}, MATRICES | {"b_up"}),
        ({"strategy": AHEAD}, MATRICES),
        ({"strategy": AHEAD, "remat": "full"}, MATRICES | {"b_up"}),
        ({"frozen": ("blocks/(down|b.*)",)}, MATRICES),  # the gradient goes through them
    ],
    ids=["none", "full", "stages", "stages full", "ahead", "ahead full", "frozen"],
)
def test_backward_gathers_matrices_but_not_biases(options, expected):
    assert reads(**options) == (expected, expected)


def test_first_block_gathers_less_if_its_input_has_no_gradient():
    """In a loop of one turn: no gradient leaves the first block, so parameters that lead only there are not read."""
    given = {"frozen": ("embed/.*", "blocks/(up|scale)")}
    assert reads(**given) == (MATRICES, MATRICES)
    assert reads(**given, scan_unroll=toy.BLOCKS) == (MATRICES, {"down"})
