"""Which positions a device holds, which sizes fit, and attention by `all_to_all`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from spmdkit.parallel.collectives import Collective, merge
from spmdkit.parallel.context import ContextConfig, kv_repeats, local_positions, size_problems, traffic
from support import attention_case, toy
from support.attention_case import (
    LENGTH,
    held_by_all,
    make_case,
    mixing,
    on_mesh,
    on_one_device,
    predicted,
    with_gradients,
)


def all_to_all(size):
    return ContextConfig(size=size, attention="all_to_all")


def test_a_device_of_the_ring_holds_an_early_and_a_late_chunk():
    order = held_by_all(16, ContextConfig(size=4)).reshape(4, 4)
    assert order.tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert order.dtype == np.int32
    assert len({int(row.sum()) for row in order}) == 1  # keys seen in all: equal


def test_all_to_all_holds_positions_in_order():
    assert held_by_all(16, all_to_all(4)).tolist() == list(range(16))


@pytest.mark.parametrize(("kv_heads", "size", "copies"), [(8, 4, 1), (2, 4, 2), (1, 4, 4), (6, 4, 2), (3, 2, 2)])
def test_key_value_heads_are_repeated_until_the_size_divides_them(kv_heads, size, copies):
    assert kv_repeats(kv_heads, all_to_all(size)) == copies


def test_traffic_is_that_of_keys_and_values():
    sizes = {"head": 10, "heads": 4, "kv_heads": 2, "dtype": "bfloat16", "platform": "cuda"}
    kept, owed = (Collective("collective-permute", ("context",), 3, 3 * 2 * 20 * width) for width in (2, 4))
    assert traffic(ContextConfig(size=4), **sizes) == ((kept,), (kept, owed), (kept,))
    forth, back = (Collective("all-to-all", ("context",), 1, elements * 2) for elements in (40 + 2 * 2 * 20, 40))
    assert traffic(all_to_all(4), **sizes) == ((forth, back), (back, forth), (forth, back))


@pytest.mark.parametrize("attention", ["ring", "all_to_all"])
def test_one_device_holds_all_positions(attention):
    config = ContextConfig(attention=attention)
    assert local_positions(6, config).tolist() == [0, 1, 2, 3, 4, 5]
    assert [*size_problems(config, 7, 3)] == []
    assert predicted(config, 2) == ((), (), ())


@pytest.mark.parametrize(
    ("config", "sizes", "messages"),
    [
        (ContextConfig(size=8), (32, 1), []),
        (all_to_all(4), (12, 4), []),
        (
            ContextConfig(size=8),
            (104, 4),
            [
                "data.length=104 cannot be split over strategy.context=8: attention=ring splits a row into 16 equal "
                "pieces, and 104 % 16 = 8. Set data.length to a multiple of 16, or lower strategy.context."
            ],
        ),
        (
            all_to_all(8),
            (20, 12),
            [
                "data.length=20 cannot be split over strategy.context=8: attention=all_to_all splits a row into 8 "
                "equal pieces, and 20 % 8 = 4. Set data.length to a multiple of 8, or lower strategy.context.",
                "model.heads: 12 heads on one device cannot be split over strategy.context=8 with "
                "attention=all_to_all: 12 % 8 = 4. Set strategy.context to a divisor of 12, or "
                "strategy.context.attention to ring.",
            ],
        ),
    ],
)
def test_rejects_invalid_sizes(config, sizes, messages):
    assert [*size_problems(config, *sizes)] == messages


# Key-value heads: as many as devices or more; fewer; fewer that do not divide it.
@pytest.mark.slow_cases("False-2-2", "False-4-4", "False-8-1", "True-4-2", "True-4-4", "True-8-1")
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_all_to_all_equals_one_device(float64, size, kv_heads, packed):
    case = make_case(kv_heads, packed=packed)
    results, moved = on_mesh(with_gradients(mixing(all_to_all(size))), all_to_all(size), case)
    for found, expected in zip(results, on_one_device(case), strict=True):
        assert toy.relative(found, expected) < 1e-12
    moves = predicted(all_to_all(size), kv_heads)
    assert moved == merge(moves.forward + moves.backward)


@pytest.mark.slow
def test_key_value_heads_that_neither_divide_nor_are_divided(float64, monkeypatch):
    """6 key-value heads on 4 devices: each twice, 3 on a device, one for each of its query heads."""
    monkeypatch.setattr(attention_case, "HEADS", 12)
    case = make_case(6)
    results, moved = on_mesh(with_gradients(mixing(all_to_all(4))), all_to_all(4), case)
    for found, expected in zip(results, on_one_device(case), strict=True):
        assert toy.relative(found, expected) < 1e-12
    assert moved == (Collective("all-to-all", ("context",), 4, 2 * (12 + 2 * 12 + 12) * 2 * LENGTH // 4 * 4 * 8),)


def test_positions_vary_over_context_alone():
    """Typed as the activations that they are taken with, on a mesh with other axes."""
    mesh = toy.mesh(data=2, context=4)
    config = ContextConfig(size=4)

    def take(x_BL):
        return jnp.take(x_BL, local_positions(LENGTH, config), axis=1)

    spec = PartitionSpec("data"), PartitionSpec("data", "context")
    rows = np.arange(2 * LENGTH).reshape(2, LENGTH)
    taken = jax.jit(jax.shard_map(take, mesh=mesh.backend_mesh, in_specs=spec[0], out_specs=spec[1]))(rows)
    assert np.array_equal(taken, rows[:, held_by_all(LENGTH, config)])
