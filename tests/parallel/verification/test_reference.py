"""One device in plain JAX, held to formulas in NumPy: what every strategy is compared with has to be right itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import Model
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.stages import assign
from spmdkit.parallel.verification.reference import OneDevice

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


def one(*, optimizer=None, clip_norm=0.0, compute="float32", stages=None, model=MODEL):
    return OneDevice(model, optimizer or optax.sgd(RATE), clip_norm=clip_norm, compute=compute, seed=3, stages=stages)


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
def test_sums_of_a_batch_with_the_numbers_of_their_step(step):
    mean, gradients = by_hand()
    found = one().sums(PARAMS, BATCH, step)
    assert found.weight == 1.75
    assert found.total == pytest.approx(1.75 * (mean + drawn(step)), rel=1e-6)
    close(found.gradients, jax.tree.map(lambda leaf: 1.75 * leaf, gradients))


def test_an_evaluation_draws_nothing():
    total, weight = one().evaluate(PARAMS, BATCH)
    assert (total, weight) == (pytest.approx(1.75 * by_hand()[0], rel=1e-6), 1.75)


@pytest.mark.parametrize("clip_norm", [0.0, CLIP])
def test_two_steps_of_gradient_descent(clip_norm):
    batches = [BATCH, {**BATCH, "weights": BATCH["weights"][::-1]}]
    found = one(clip_norm=clip_norm).train(PARAMS, batches)
    params, norms = PARAMS, []
    for number, batch in enumerate(batches):
        mean, gradients = by_hand(params, batch)
        assert found.losses[number] == pytest.approx(mean + drawn(number), rel=1e-5)
        norms.append(float(np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(gradients)))))
        rate = RATE * (min(1.0, clip_norm / norms[-1]) if clip_norm else 1.0)
        params = jax.tree.map(lambda leaf, slope, rate=rate: leaf - rate * slope, params, gradients)
    close(found.params, params)
    close(found.gradients, by_hand()[1])
    assert found.norms == pytest.approx(norms, rel=1e-5)
    assert (found.weight, found.norm, found.weights) == (1.75, found.norms[0], (1.75, 1.75))


def test_a_batch_without_weight_divides_by_nothing():
    found = one().train(PARAMS, [{**BATCH, "weights": np.zeros(3, np.float32)}])
    assert (found.losses, found.weights, found.norms) == ((0.0,), (0.0,), (0.0,))
    close(found.params, PARAMS)


def test_blocks_are_stored_stage_by_stage_and_computed_in_order():
    """Down the stages and up again; the order of the model is what counts."""
    stages = assign(4, make_schedule("zbv", 2, 4), ())
    order = [0, 3, 1, 2]
    device = one(stages=stages)
    stored = device.init("float32")
    assert stored["blocks"]["b"].tolist() == order
    close(device.to_model(stored), PARAMS)
    close(device.sums(stored, BATCH).gradients["blocks"]["b"], 1.75 * by_hand()[1]["blocks"]["b"][order])
    close(
        device.train(stored, [BATCH]).params["blocks"]["b"], one().train(PARAMS, [BATCH]).params["blocks"]["b"][order]
    )


def test_rows_that_fill_up_a_stage_are_zeros_and_not_read():
    device = one(stages=assign(4, make_schedule("1f1b", 3, 3), ()))  # 0 1 | 2 - | 3 -
    stored = device.init("float32")
    assert stored["blocks"]["b"].tolist() == [0, 1, 2, 0, 3, 0]
    stored["blocks"]["b"][[3, 5]] = 99
    close(device.to_model(stored), PARAMS)


def test_first_parameters_are_stored_as_asked_for():
    assert one().init("bfloat16")["w"].dtype == jnp.bfloat16
    close(one().init("float32"), PARAMS)


def test_parameters_and_inputs_are_cast_and_exact_counts_are_not():
    seen = {}

    def recording(params, batch, key):
        seen.update({name: str(array.dtype) for name, array in {**batch, "w": params["w"]}.items()})
        return loss(params, batch, key)

    one(model=Model(init=init, loss=recording), compute="bfloat16").sums(PARAMS, BATCH)
    assert seen == {"inputs": "bfloat16", "w": "bfloat16", "targets": "float32", "weights": "float32"}


def test_an_optimizer_may_ask_for_the_loss():
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda leaf: -value * jnp.ones_like(leaf), updates), state

    asking = optax.GradientTransformationExtraArgs(lambda params: (), update)
    found = one(optimizer=asking).train(PARAMS, [BATCH])
    close(found.params["w"], PARAMS["w"] - found.losses[0])


def test_tolerances_follow_from_what_the_model_casts_to():
    def tolerances(**options):
        loss, update = one(**options).narrowings(PARAMS, BATCH)
        return loss.tolerance, max(loss.tolerance, update.tolerance)

    assert tolerances() == (1e-5, 1e-5)
    narrow = optax.stateless(lambda updates, params: jax.tree.map(lambda leaf: leaf.astype("bfloat16"), updates))
    assert tolerances(optimizer=narrow) == (1e-5, 5e-2)
    rate = optax.scale_by_schedule(lambda count: (count + 0.1).astype("bfloat16").astype("float32"))
    assert tolerances(optimizer=rate) == (1e-5, 1e-5), "one number is the same everywhere"
    assert tolerances(compute="bfloat16") == (5e-2, 5e-2)
