"""Which dim the next axis splits: the first whole one that it divides, then inside the parts there are."""

import pytest
import toy
from spmdkit.layouts.split_dim import add_axis, split_further

from spmdkit import TensorLayout

MESH = toy.mesh(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    ("base", "shape", "first", "axes", "dim"),
    [
        ((None, None), (8, 16), 0, ("fsdp", None), 0),  # the first, not the largest
        ((None, None), (7, 16), 0, (None, "fsdp"), 1),
        ((None, None, None), (8, 8, 8), 1, (None, "fsdp", None), 1),
        (("tensor", None), (8, 16), 0, ("tensor", "fsdp"), 1),  # a whole dim before one that is split
        (("tensor", None), (8, 7), 0, (("tensor", "fsdp"), None), 0),
        (("tensor", None), (8, 7), 1, None, None),
        (("tensor", None), (6, 7), 0, None, None),  # 6 / 2 / 2 does not work out
        ((("tensor", "data"),), (8,), 0, (("tensor", "data", "fsdp"),), 0),
        ((None,), (9,), 0, None, None),
        ((), (), 0, None, None),
    ],
)
def test_which_dim(base, shape, first, axes, dim):
    found = split_further(TensorLayout(base, MESH), shape, MESH, "fsdp", first=first)
    if axes is None:
        assert found is None
    else:
        layout, split = found
        assert (layout.axes, split) == (axes, dim)


def test_an_axis_is_added_inside_the_parts_that_there_are():
    layout = TensorLayout((None, "tensor"), MESH)
    added = add_axis(layout, 1, "fsdp", MESH)
    assert added.axes == (None, ("tensor", "fsdp"))
    assert added.shard_shape((4, 16)) == (4, 4)
    assert add_axis(added, 0, "data", MESH).axes == ("data", ("tensor", "fsdp"))
