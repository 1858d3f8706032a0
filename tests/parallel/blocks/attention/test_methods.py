"""Attention with heads over devices: the numbers of one device, and the traffic of its cost."""

import numpy as np
from spmdkit.parallel.blocks.attention.methods import ATTENTION, all_to_all_attention
from spmdkit.parallel.context import METHODS, ContextConfig
from support.attention_case import HEADS, LENGTH, make_case, on_mesh


def test_every_method_has_a_function_and_its_costs():
    assert ATTENTION.keys() == METHODS.keys()


def config(size):
    return ContextConfig(size=size, attention="all_to_all")


def test_all_to_all_gives_each_device_all_positions_of_its_heads():
    seen = []

    def attend(query, key, value, segment):
        seen.append((query.shape, key.shape, value.shape, segment))
        return query

    def mix(query, key, value):
        return (all_to_all_attention(query, key, value, attend=attend, config=config(4)),)

    case = make_case(2, dtype=np.float32)
    (found,), _ = on_mesh(mix, config(4), case._replace(arrays=case.arrays[:3]), num_outputs=1)
    rows, head_size = case.arrays[0].shape[0], case.arrays[0].shape[3]
    assert seen[0] == (*[(rows, LENGTH, heads, head_size) for heads in (HEADS // 4, 1, 1)], None)
    assert np.array_equal(found, case.arrays[0]), "heads come back where they were"
