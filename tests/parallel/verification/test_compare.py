"""Strategies against one device, problems of the model itself, and the claims of a run."""

import json
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmdkit.mesh.compat import known_faults
from spmdkit.mesh.errors import UserError
from spmdkit.parallel import FSDPConfig, batch_axes, verify
from spmdkit.parallel.sharding.model_errors import ModelError
from spmdkit.parallel.verification.result import BREAKS_CONTRACT, NOT_FINITE
from support import toy
from support.verification import (
    BLOCK_MODEL,
    MODEL,
    batches,
    found,
    loss,
    one_device_is_compiled_once,  # noqa: F401  (a fixture of every test here)
    verified,
)

pytestmark = pytest.mark.slow

# What is right


@cache
def right():
    return verified(accumulate=2, clip_norm=0.1)


def test_everything_agrees():
    result = right()
    assert result.ok, str(result)
    assert {each.path for each in result.gradients} == {"first", "scale", "second"}
    assert result.losses == pytest.approx(result.reference_losses, rel=1e-12)
    assert result.tolerance == result.params_tolerance == 1e-9
    assert result.widened == ()
    assert "wider tolerances" not in str(result)
    assert max(error.relative for error in result.errors.values()) < 1e-12
    assert result.collectives.found == result.collectives.predicted != ()
    assert "The same as on one device." in str(result)
    assert len(result.known_faults) == len(known_faults("cpu"))
    assert all("The reference may be wrong, too: install jaxlib" in fault for fault in result.known_faults)
    assert not jax.config.jax_enable_x64


def test_widens_tolerance_of_float32_model():
    def narrow(params, batch, key):
        return loss(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), batch, key)

    result = verified(replace(MODEL, loss=narrow))
    assert result.ok, str(result)
    assert (result.dtype, result.tolerance) == ("float64", 1e-5)
    (widened,) = result.widened
    assert (widened.what, widened.array, widened.tolerance) == ("loss and gradients", "float64[16,16]", 1e-5)
    assert "is cast to float32 at verification/test_compare.py:" in widened.reason
    assert str(result).splitlines()[-1].endswith(f"; wider tolerances: {widened}")
    assert result.to_json()["widened"] == [widened._asdict()]


def test_blocks_accumulation_and_rules_over_an_axis_of_xla():
    strategy = {"data": 2, "fsdp": FSDPConfig(size=2, floor_bytes=256), "tensor": {"size": 2}}
    rules = {"blocks/up": (None, "fsdp", "tensor")}
    given = [toy.batch(seed) for seed in range(3)]
    result = verify(BLOCK_MODEL, strategy, given, rules=rules, accumulate=2, clip_norm=0.5)
    assert result.ok, str(result)
    assert any("tensor" in line.axes for line in result.collectives.left_to_xla)


def test_lists_gathers_of_a_contrastive_loss_as_the_models_own():
    def contrastive(params, batch, key):
        vectors = jnp.tanh(batch["inputs"] @ params["first"]) * params["scale"][None]
        own = {"vectors": vectors, "example": batch["example"], "weights": batch["weights"]}
        of_all = lax.all_gather(own, batch_axes(), tiled=True)
        scores = jnp.where(
            of_all["weights"][None] > 0, (vectors @ params["second"]) @ params["second"].T @ of_all["vectors"].T, -1e9
        )
        same = batch["example"][:, None] == of_all["example"][None]
        losses = -jnp.where(same, jax.nn.log_softmax(scores), 0).sum(axis=1)
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    result = verified(replace(MODEL, loss=contrastive))
    assert result.ok, str(result)
    assert "collectives" in result.proved
    assert result.collectives.found == result.collectives.predicted
    own = {line.key for line in result.collectives.of_the_model}
    assert own == {("all-gather", ("data", "fsdp")), ("reduce-scatter", ("data", "fsdp"))}
    assert "with the model's own" in str(result)


def ignores_weights(params, batch, key):
    total, _ = loss(params, {**batch, "weights": jnp.ones_like(batch["weights"])}, key)
    return total, jnp.asarray(float(len(batch["weights"])))


def counts_rows(params, batch, key):
    total, _ = loss(params, batch, key)
    return total, jnp.asarray(float(len(batch["weights"])))


def scales_at_random(params, batch, key):
    total, weight = loss(params, batch, key)
    return total * np.random.random(), weight


def normalizes_own_rows(params, batch, key):
    inputs = batch["inputs"]
    return loss(params, {**batch, "inputs": inputs - inputs.mean(axis=0)[None]}, key)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (ignores_weights, "rows of weight zero count"),
        (counts_rows, "rows of weight zero count"),
        (scales_at_random, "it computes something else each time that JAX traces it"),
        (normalizes_own_rows, "its rows depend on each other"),
    ],
)
def test_checks_the_contract_before_it_compares(broken, text):
    """The first two train as on one device, and differ only in the padding of an evaluation."""
    result = verified(replace(MODEL, loss=broken), check="error")
    found(result, BREAKS_CONTRACT, "", "The model, not the strategy: on one device as well", text)
    assert f"WRONG on one device already: {BREAKS_CONTRACT}" in str(result)
    assert "batch norm" not in result.first_difference.hint or broken is normalizes_own_rows
    assert result.not_looked_at == ("anything else: the contract is broken",)


def test_finds_a_batch_norm_of_two_rows():
    rows = [{name: array[:2] for name, array in batch.items()} for batch in batches()]
    model = replace(MODEL, loss=normalizes_own_rows)
    for given in (rows, rows[:1]):
        result = verify(model, {"data": 2}, given, devices=toy.devices(2))
        found(result, BREAKS_CONTRACT, "", "its rows depend on each other")


def test_compares_a_model_that_breaks_its_contract_if_told_to():
    result = verified(replace(MODEL, loss=counts_rows), check="warn")
    assert result.ok, str(result)
    assert any("rows of weight zero count" in note for note in result.notes)
    assert "the model's contract" not in result.proved
    assert "the model's contract (it is broken, see the note)" in result.not_looked_at
    assert not any("GPU code" in part for part in result.not_looked_at), "the note is about the model"
    result = verified(replace(MODEL, loss=counts_rows), check="off")
    assert result.ok, str(result)
    assert "the model's contract (model.check: off)" in result.not_looked_at
    assert "the model's contract" not in result.proved
    with pytest.raises(UserError, match="check='maybe' is not one of error, warn, off"):
        verified(check="maybe")


def test_names_the_line_of_a_model_that_runs_only_on_its_mesh():
    def summed(params, batch, key):
        mean = lax.pmean(batch["inputs"].mean(axis=0), "data")
        return loss(params, {**batch, "inputs": batch["inputs"] - mean[None]}, key)

    def placed(params, batch, key):
        total, weight = loss(params, batch, key)
        return total + 0 * lax.axis_index("data"), weight

    for broken in (summed, placed):
        with pytest.raises(ModelError, match=r"loss fails in .*test_compare\.py, line \d+ \(.*unbound axis name: data"):
            verified(replace(MODEL, loss=broken))


def test_reports_nonfinite_model():
    def broken(params, batch, key):
        total, weight = loss(params, batch, key)
        return total * jnp.nan, weight

    result = verified(replace(MODEL, loss=broken))
    found(result, NOT_FINITE, "", "It is nan on one device as well")
    json.dumps(result.to_json(), allow_nan=False)


def test_finds_rows_that_depend_on_each_other():
    """A batch norm: every device would take the mean of its own rows."""

    def normed(params, batch, key):
        inputs = batch["inputs"]
        return loss(params, {**batch, "inputs": inputs - inputs.mean(axis=0)[None]}, key)

    result = verified(replace(MODEL, loss=normed))
    first = found(result, "loss", "", "The model, not the strategy: on one device as well", "its rows depend on each")
    assert "is not counted" not in first.hint
