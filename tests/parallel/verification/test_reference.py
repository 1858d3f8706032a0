"""One device in plain JAX against formulas in NumPy, and errors of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from spmdkit.parallel import Model
from spmdkit.parallel.verification.differences import (
    SMALL,
    SMALL_IN_FLOAT32,
    LeafError,
    leaf_errors,
    numbers,
    state_errors,
)
from spmdkit.parallel.verification.reference import OneDevice, report
from support import toy

RATE, CLIP = 0.1, 0.5


def init(key):
    return {"w": jnp.array([1.0, -2.0]), "blocks": {"b": jnp.arange(4.0)}}


def loss(params, batch, key):
    """Squares of a line; the sum of what the blocks hold counts by their place in the model."""
    place = jnp.arange(4.0)
    errors = batch["inputs"] @ params["w"] + jnp.sum(params["blocks"]["b"] * place) - batch["targets"]
    drawn = 0.0 if key is None else jax.random.uniform(key)
    return (batch["weights"] * (errors**2 + drawn)).sum(), batch["weights"].sum()


MODEL = Model(init=init, loss=loss)
BATCH = {
    "inputs": np.array([[1.0, 0.0], [0.5, 2.0], [3.0, 1.0]], np.float32),
    "targets": np.array([14.0, 10.0, 15.0], np.float32),
    "weights": np.array([1.0, 0.5, 0.25], np.float32),
}
PARAMS = {"w": np.array([1.0, -2.0], np.float32), "blocks": {"b": np.arange(4, dtype=np.float32)}}


def one(*, optimizer=None, clip_norm=0.0, compute="float32", model=MODEL):
    return OneDevice(model, optimizer or optax.sgd(RATE), clip_norm=clip_norm, compute=compute, seed=3)


def by_hand(params=PARAMS, batch=BATCH):
    """The mean of the squares and its gradients, without what is drawn."""
    inputs, targets, weights = (np.asarray(batch[name], np.float64) for name in ("inputs", "targets", "weights"))
    errors = inputs @ params["w"] + params["blocks"]["b"] @ np.arange(4.0) - targets
    slopes = 2 * weights * errors / weights.sum()
    gradients = {"w": slopes @ inputs, "blocks": {"b": slopes.sum() * np.arange(4.0)}}
    return float(weights @ errors**2 / weights.sum()), gradients


def drawn(step):
    """What the run of seed 3 draws in a step."""
    return float(jax.random.uniform(jax.random.fold_in(jax.random.key(3, impl="threefry2x32"), step)))


def close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(lambda one, other: np.allclose(one, other, rtol=2e-6, atol=1e-7), found, expected))


@pytest.mark.parametrize("step", [0, 5])
def test_sums_batch_with_random_numbers_of_step(step):
    mean, gradients = by_hand()
    found = one().sums(PARAMS, BATCH, step)
    assert found.weight == 1.75
    assert found.total == pytest.approx(1.75 * (mean + drawn(step)), rel=1e-6)
    close(found.gradients, jax.tree.map(lambda leaf: 1.75 * leaf, gradients))


def test_evaluation_is_deterministic():
    assert one().measure(PARAMS, BATCH)[:2] == (pytest.approx(1.75 * by_hand()[0], rel=1e-6), 1.75)


@pytest.mark.parametrize("clip_norm", [0.0, CLIP])
def test_takes_two_steps_of_gradient_descent(clip_norm):
    batches = [BATCH, {**BATCH, "weights": BATCH["weights"][::-1]}]
    found = one(clip_norm=clip_norm).train(PARAMS, batches)
    params = PARAMS
    for number, batch in enumerate(batches):
        mean, gradients = by_hand(params, batch)
        norm = float(np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(gradients))))
        assert found.reports[number] == pytest.approx(report(mean + drawn(number), norm, 1.75, {}), rel=1e-5)
        rate = RATE * (min(1.0, clip_norm / norm) if clip_norm else 1.0)
        params = jax.tree.map(lambda leaf, slope, rate=rate: leaf - rate * slope, params, gradients)
    close(found.params, params)
    close(found.first.gradients, jax.tree.map(lambda leaf: 1.75 * leaf, by_hand()[1]))


def test_accepts_batch_without_weight():
    found = one().train(PARAMS, [{**BATCH, "weights": np.zeros(3, np.float32)}])
    assert found.reports == (report(0.0, 0.0, 0.0, {}),)
    close(found.params, PARAMS)


def test_casts_parameters_and_inputs_but_not_weights():
    seen = {}

    def recording(params, batch, key):
        seen.update({name: str(array.dtype) for name, array in {**batch, "w": params["w"]}.items()})
        return loss(params, batch, key)

    one(model=Model(init=init, loss=recording), compute="bfloat16").sums(PARAMS, BATCH, 0)
    assert seen == {"inputs": "bfloat16", "w": "bfloat16", "targets": "float32", "weights": "float32"}


def test_passes_loss_to_optimizer():
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda leaf: -value * jnp.ones_like(leaf), updates), state

    asking = optax.GradientTransformationExtraArgs(lambda params: (), update)
    found = one(optimizer=asking).train(PARAMS, [BATCH])
    close(found.params["w"], PARAMS["w"] - found.reports[0]["loss"])


def test_tolerances_follow_casts():
    def tolerances(**options):
        loss, update = one(**options).narrowings(PARAMS, BATCH)
        return loss.tolerance, max(loss.tolerance, update.tolerance)

    assert tolerances() == (1e-5, 1e-5)
    narrow = optax.stateless(lambda updates, params: jax.tree.map(lambda leaf: leaf.astype("bfloat16"), updates))
    assert tolerances(optimizer=narrow) == (1e-5, 5e-2)
    rate = optax.scale_by_schedule(lambda count: (count + 0.1).astype("bfloat16").astype("float32"))
    assert tolerances(optimizer=rate) == (1e-5, 1e-5), "one number is the same everywhere"
    assert tolerances(compute="bfloat16") == (5e-2, 5e-2)


MESH = toy.mesh(data=2, fsdp=2)


def placed(spec, *parts):
    """An array whose parts on devices 0, 1, 2 and 3 are given, copies that differ included."""
    sharding = jax.sharding.NamedSharding(MESH.backend_mesh, PartitionSpec(*spec))
    devices = MESH.backend_mesh.devices.flat
    arrays = [jax.device_put(np.float32(part), device) for part, device in zip(parts, devices, strict=True)]
    shape = (len(parts[0]) * (2 if spec else 1),)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def test_finds_replica_that_differs():
    right = placed(("fsdp",), [1, 2], [3, 4], [1, 2], [3, 4])
    wrong = placed(("fsdp",), [1, 2], [3, 4], [1, 2], [3, 6])
    reference = {"x": np.array([1.0, 2, 3, 4])}
    assert leaf_errors({"x": right}, reference) == [LeafError(0.0, "x")]
    assert leaf_errors({"x": wrong}, reference) == [LeafError(2 / 4, "x")]
    wrong = placed(("fsdp",), [1, 2], [3, 4], [1, 2], [3, np.nan])
    assert leaf_errors({"x": wrong}, reference) == [LeafError(np.inf, "x")]


@pytest.mark.parametrize(("tolerance", "noise"), [(1e-9, SMALL), (1e-5, SMALL_IN_FLOAT32)])
def test_scales_error_of_small_leaf(tolerance, noise):
    found = {"large": jnp.array([1.0]), "small": jnp.array([noise / 4])}
    reference = {"large": np.array([1.0]), "small": np.array([noise / 2])}
    (worst, _) = leaf_errors(found, reference, tolerance=tolerance)
    assert worst.path == "small"
    assert worst.relative == pytest.approx(1 / 4, rel=1e-6)


def test_scales_error_by_measured_rounding():
    found, reference = {"x": jnp.array([2.0]), "y": jnp.array([2.0])}, {"x": np.array([1.0]), "y": np.array([1.0])}
    other = {"x": np.array([1.0]), "y": np.array([1.0 + 1e-9])}
    x, y = leaf_errors(found, reference, tolerance=1e-9, moved=other)
    assert (x.path, x.relative, x.wider, x.tolerance) == ("x", 1.0, 1.0, 1e-9)
    assert (y.path, y.relative, y.wider) == ("y", pytest.approx(1 / 16, rel=1e-6), pytest.approx(16, rel=1e-6))


def test_scales_moments_by_their_kind():
    """A second moment is small beside a first one: against that, it would be lost."""
    params = {"w": jnp.ones(1), "b": jnp.ones(1)}
    reference = {"mu": {"w": np.array([1.0]), "b": np.array([1.0])}, "nu": {"w": np.array([1e-8]), "b": np.zeros(1)}}
    found = {"mu": {"w": jnp.array([1.0]), "b": jnp.array([1.0])}, "nu": {"w": jnp.array([2e-8]), "b": jnp.zeros(1)}}
    (worst, *others) = state_errors(found, reference, params)
    assert worst.path == "nu/w"
    assert worst.relative == pytest.approx(1.0, rel=1e-6)
    assert [each.relative for each in others] == [0, 0, 0]


def test_accepts_equal_infinite_state():
    """Such as the best loss so far, before the first step."""
    assert state_errors({"best": jnp.array(jnp.inf)}, {"best": np.array(np.inf)}, {}) == [LeafError(0.0, "best")]
    assert state_errors({"best": jnp.array(1.0)}, {"best": np.array(np.inf)}, {}) == [LeafError(np.inf, "best")]


def test_compares_keys_by_data():
    key = jax.random.key(3)
    assert np.array_equal(numbers(key), jax.random.key_data(key))
    assert state_errors({"rng": key}, {"rng": jax.random.key(3)}, {}) == [LeafError(0.0, "rng")]
    assert state_errors({"rng": key}, {"rng": jax.random.key(4)}, {})[0].relative > 0
