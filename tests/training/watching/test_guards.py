"""The section `guards`: what it may hold."""

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.training.watching.guards import GuardsConfig


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas_every": -1}, "guards.replicas_every=-1 must be at least 1, or 0 for saves only."),
        ({"stragglers": 1.0}, "guards.stragglers=1.0 is a share of a step"),
        ({"stragglers": -0.1}, "guards.stragglers=-0.1 is a share of a step"),
        ({"straggler_steps": 1}, "guards.straggler_steps=1 must be at least 2."),
    ],
)
def test_bad_values_are_refused(given, said):
    with pytest.raises(UserError, match=said):
        GuardsConfig(**given)


def test_what_costs_is_off_by_default():
    assert GuardsConfig().replicas_every == 0
