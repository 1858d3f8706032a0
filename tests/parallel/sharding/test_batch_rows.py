"""Batches that a plan cannot split, and the axes that a loss sums over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel.sharding.batch_rows import (
    batch_axes,
    check_eval_rows,
    check_rows,
    record_batch_axes,
    uses_batch_axes,
)
from support.small_transformers import FSDP, MIXTURE, layouts


@pytest.mark.parametrize(
    ("given", "rows", "accumulate", "problem"),
    [
        (layouts(4, data=2, fsdp=FSDP), 6, 1,
         "A batch of 6 rows cannot be split over data 2 x fsdp 2 and accumulate 1: 6 % 4 = 2. Set train.global_batch "
         "to a multiple of 4 (8 is the nearest), or change strategy or train.accumulate."),
        (layouts(4, data=2, pipe={"size": 2, "microbatches": 4}), 20, 2,
         "A batch of 20 rows cannot be split over data 2, strategy.pipe.microbatches 4 and accumulate 2: 20 % 16 = 4. "
         "Set train.global_batch to a multiple of 16 (16 is the nearest), or change strategy or train.accumulate."),
        (layouts(2, tensor=2), 3, 2, "A batch of 3 rows cannot be split over 1 device and accumulate 2: 3 % 2 = 1."),
        (layouts(2, MIXTURE, expert=2), 3, 1, "cannot be split over expert 2 and accumulate 1: 3 % 2 = 1."),
        (layouts(1, data=1), 0, 1, "A batch of 0 rows"),
    ],
)  # fmt: skip
def test_rejects_rows_that_cannot_be_split(given, rows, accumulate, problem):
    with pytest.raises(ValueError) as raised:
        check_rows(given, rows, accumulate)
    assert problem in str(raised.value)
    check_rows(given, given.eval_rows.total * 8 * accumulate, accumulate)


def test_evaluation_ignores_microbatches():
    given = layouts(4, data=2, pipe={"size": 2, "microbatches": 4})
    check_eval_rows(given, 2)
    with pytest.raises(ValueError, match=r"of 3 rows cannot be split over data 2: 3 % 2 = 1\. Pad it to a"):
        check_eval_rows(given, 3)


def test_batch_axes_are_empty_on_one_device():
    assert batch_axes() == ()
    assert float(jax.jit(lambda x: lax.pmean(x, batch_axes()))(3.0)) == 3.0


def test_batch_axes_are_those_with_several_devices():
    mesh = DeviceMesh((2, 1, 4), ("data", "expert", "fsdp")).backend_mesh
    seen = []

    def mean(x):
        seen.append(batch_axes())
        return lax.pmean(x.mean(), batch_axes())

    rows = jnp.arange(16.0)
    mapped = jax.shard_map(mean, mesh=mesh, in_specs=PartitionSpec(("data", "fsdp")), out_specs=PartitionSpec())
    assert float(jax.jit(mapped)(rows)) == 7.5
    assert seen == [("data", "fsdp")]


def test_use_of_batch_axes_is_recorded():
    def uses(x):
        return jax.jit(lambda x: lax.pmean(x, batch_axes()))(x)

    for _ in range(2):  # an earlier trace hides nothing
        assert uses_batch_axes(uses, np.ones(3))
    assert not uses_batch_axes(lambda x: x.sum(), np.ones(3))
    with record_batch_axes() as outer:
        assert not uses_batch_axes(lambda x: x, 1.0)
    assert outer == []
