"""Adapters beside the parameters of a group, and their product merged by hand."""

import jax
import numpy as np
import pytest
from spmdkit.models.layers.low_rank import group_of, merged, with_adapters

BLOCKS, ROWS, COLUMNS, RANK = 2, 3, 4, 2


def params(blocks=BLOCKS):
    random = np.random.default_rng(0)
    return {
        "mlp": {"up": random.normal(size=(blocks, ROWS, COLUMNS)).astype(np.float32)},
        "norm": np.ones((blocks, ROWS), np.float32),
    }


def adapted(own, key=0):
    group = group_of("blocks", own, {"blocks/mlp/up", "head/out"}, stacked=True)
    return group, with_adapters(group, own, RANK, jax.random.key(key))


def test_adapters_stand_beside_what_they_adapt():
    group, tree = adapted(params())
    assert list(group.adapted) == ["mlp/up"], "of another group nothing"
    assert set(tree) == {"mlp", "norm", "lora"}
    a, b = tree["lora"]["mlp"]["up"]["a"], tree["lora"]["mlp"]["up"]["b"]
    assert (a.shape, b.shape) == ((BLOCKS, ROWS, RANK), (BLOCKS, RANK, COLUMNS))
    assert a.any()
    assert not b.any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float16, 2e-3)])
def test_merged_is_the_matrix_and_a_part_of_the_product(dtype, tolerance):
    own = params()
    own["mlp"]["up"] = own["mlp"]["up"].astype(dtype)
    group, tree = adapted(own)
    pair = tree["lora"]["mlp"]["up"]
    pair["b"] = np.random.default_rng(1).normal(size=pair["b"].shape).astype(np.float32)
    found = merged(group, tree, scale=0.5)
    expected = own["mlp"]["up"] + 0.5 * np.einsum("nir,nro->nio", np.asarray(pair["a"]), pair["b"])
    assert found["mlp"]["up"].dtype == dtype
    np.testing.assert_allclose(found["mlp"]["up"], expected, rtol=tolerance, atol=tolerance)
    assert found["norm"] is own["norm"]
    assert set(found) == {"mlp", "norm"}


def test_the_a_of_a_block_does_not_depend_on_how_many_there_are():
    three, two = (adapted(params(blocks))[1]["lora"]["mlp"]["up"]["a"] for blocks in (3, 2))
    np.testing.assert_array_equal(three[:2], two)
    assert (two[0] != two[1]).all()


def test_parameters_that_are_no_dict_stand_apart():
    own = (np.ones((ROWS, COLUMNS), np.float32), np.ones((), np.float32))
    group = group_of("", own, {"0"}, stacked=False)
    tree = with_adapters(group, own, RANK, jax.random.key(0))
    assert set(tree) == {"base", "lora"}
    assert jax.tree.structure(merged(group, tree, scale=1.0)) == jax.tree.structure(own)


def test_nothing_is_changed_where_nothing_is_adapted():
    own = params()
    group = group_of("blocks", own, set(), stacked=True)
    assert with_adapters(group, own, RANK, jax.random.key(0)) is own
    assert merged(group, own, scale=1.0) is own
