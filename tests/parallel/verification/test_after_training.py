"""The check of the loss scale, given a step."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.parallel import Precision
from spmdkit.parallel.step.loss_scaling import LossScale, next_loss_scale
from spmdkit.parallel.step.state import TrainState
from spmdkit.parallel.verification.after_training import check_loss_scale
from spmdkit.parallel.verification.reference import Sums

KEPT = "After a step whose gradients are not finite, the loss scale is 4 and 3 steps count as finite; expected 4 and 0."


@pytest.mark.parametrize(("change", "text"), [({}, ""), ({"good_steps": 3}, KEPT)])
def test_expects_count_of_finite_steps_to_restart(change, text):
    def step(state, batch):
        scale = next_loss_scale(state.loss_scale, np.isfinite(batch["weights"]).all(), 5)
        return state._replace(loss_scale=scale._replace(**change)), None

    step.precision = Precision(loss_scale_interval=5)
    one_device = SimpleNamespace(sums=lambda *given: Sums(np.nan, np.nan, {"w": np.array(np.nan)}))
    given = {"batches": [{"weights": np.ones(2, np.float32)}], "in_model_order": lambda tree: tree}
    state = TrainState(jnp.int32(1), {}, (), (), loss_scale=LossScale(jnp.float32(8), jnp.int32(3)))
    assert check_loss_scale(SimpleNamespace(step=step, one_device=one_device, **given), state) == text
