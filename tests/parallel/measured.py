"""A verification in which everything agrees, to be changed in one thing by a test."""

from dataclasses import replace

import numpy as np
from spmdkit.parallel.verification.causality import Future
from spmdkit.parallel.verification.collective_check import CollectiveCheck
from spmdkit.parallel.verification.differences import LeafError
from spmdkit.parallel.verification.reference import Reference
from spmdkit.parallel.verification.result import Verification
from spmdkit.parallel.verification.round_trip import RoundTrip
from spmdkit.parallel.xla.census import Collective

MOVED = (Collective("all-reduce", ("data",), 2, 1536),)
AGREES = Verification(
    mesh={"data": 2, "fsdp": 1},
    dtype="float64",
    steps=2,
    tolerance=1e-9,
    params_tolerance=1e-8,
    init_tolerance=1e-5,
    init_rel=0.0,
    loss_rel=1e-16,
    weight_rel=0.0,
    gradients=(LeafError(2e-15, "second"), LeafError(1e-15, "first")),
    grad_norm_rel=3e-16,
    params=(LeafError(4e-15, "second"), LeafError(0.0, "first")),
    optimizer=(LeafError(5e-15, "0/mu/second"), LeafError(0.0, "0/mu/first")),
    reported=(6e-16, "loss of step 1"),
    losses=(2.0, 1.5),
    reference_losses=(2.0, 1.5),
    collectives=CollectiveCheck(predicted=MOVED, found=MOVED),
    first_difference=None,
)
TRIP = RoundTrip(mesh={"fsdp": 2}, arrays=7, params=(LeafError(1e-15, "first"),), differing=(), next_step=0.0)
BEYOND = replace(AGREES, evaluation_rel=1e-16, round_trip=TRIP, future=Future(positions=(0, 3, 6)))
"""The same where what is beyond the steps was looked at."""


def reference(**changed):
    """Two steps on one device."""
    arrays = {"first": np.array([1.0, 2.0]), "second": np.array([[3.0]])}
    given = {
        "losses": (2.0, 1.5),
        "weights": (8.0, 8.0),
        "norms": (0.5, 0.25),
        "gradients": arrays,
        "params": {path: 2 * leaf for path, leaf in arrays.items()},
        "opt_state": (),
    }
    return Reference(**{**given, **changed})
