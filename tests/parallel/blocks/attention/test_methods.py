"""Attention with heads over devices: the numbers of one device, and the traffic of its cost."""

import numpy as np
import pytest
from spmdkit.parallel.blocks.attention.methods import ATTENTION, all_to_all_attention
from spmdkit.parallel.collectives import merge
from spmdkit.parallel.context import METHODS, ContextConfig
from support import toy
from support.attention_case import HEADS, LENGTH, make_case, mixing, on_mesh, on_one_device, predicted, with_gradients


def test_every_method_has_a_function_and_its_costs():
    assert ATTENTION.keys() == METHODS.keys()


def config(size):
    return ContextConfig(size=size, attention="all_to_all")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kv_heads", "packed"), [(2, 2, False), (4, 2, True)])
def test_all_to_all_equals_one_device_and_moves_the_predicted_bytes(float64, size, kv_heads, packed):
    """Over 4 devices, 2 heads of keys are repeated first."""
    case = make_case(kv_heads, packed=packed)
    results, moved = on_mesh(with_gradients(mixing(config(size))), config(size), case)
    for found, expected in zip(results, on_one_device(case), strict=True):
        assert toy.relative(found, expected) < 1e-12
    traffic = predicted(config(size), kv_heads)
    assert moved == merge(traffic.forward + traffic.backward)
    assert {line.kind for line in moved} == {"all-to-all"}


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
