"""The sums of a batch under a strategy, as one device has them: not divided by the weight, and not clipped."""

import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.parallel import Model
from spmdkit.parallel.verification.case import Case
from support import toy

BATCH = {"inputs": np.array([[3.0, 0], [0, 1]], np.float32), "weights": np.array([1, 4], np.float32)}


def loss(params, batch, key):
    return (batch["weights"] * (batch["inputs"] @ params["w"])).sum(), batch["weights"].sum()


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 2.0])
def test_undoes_clipping_where_a_norm_is_larger(clip_norm):
    step = toy.build({"data": 2}, model=Model(init=lambda key: {"w": jnp.ones(2)}, loss=loss), clip_norm=clip_norm)
    state = step.init(0, {"w": np.array([1, 2], np.float32)})
    found, norm = Case(step, None, {}, (), clip_norm, 1e-5, 1e-5).sums(state, BATCH)
    assert (found.total, found.weight, norm) == pytest.approx((11, 5, 1))
    np.testing.assert_allclose(found.gradients["w"], [3, 4], rtol=1e-5)
