"""The names of each library; that a library finds its arrays by them is in test_configured.py."""

import pytest
from spmdkit.models.adapters.own_names import groups_of, own_name


@pytest.mark.parametrize(
    ("library", "param", "state"),
    [
        ("flax.linen", "params/Dense_0/kernel", "batch_stats/BatchNorm_0/mean"),
        ("flax.nnx", "Dense_0/kernel", "batch_stats/BatchNorm_0/mean"),
        ("equinox", "Dense_0/kernel", "state/batch_stats/BatchNorm_0/mean"),
        ("keras", "Dense_0/kernel", "batch_stats/BatchNorm_0/mean"),
        ("", "Dense_0/kernel", None),
    ],
)
def test_names(library, param, state):
    assert own_name(library, "params/Dense_0/kernel") == param
    assert ("model_state" in groups_of(library)) == (state is not None)
    if state:
        assert own_name(library, "model_state/batch_stats/BatchNorm_0/mean") == state
