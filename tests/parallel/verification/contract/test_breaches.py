"""A model that breaks the contract is told which part and how to mend it; a right one is never accused."""

from dataclasses import replace
from functools import wraps

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax import lax
from spmdkit.models import MoEConfig, TransformerConfig, moe, transformer
from spmdkit.parallel import Model
from spmdkit.parallel.verification.contract.breaches import breaches

WIDTH, CLASSES, ROWS = 8, 4, 6


def init(key):
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (WIDTH, WIDTH)) * 0.3,
        "second": jax.random.normal(second, (WIDTH, CLASSES)) * 0.3,
    }


def hidden(params, batch):
    return jnp.tanh(batch["inputs"] @ params["first"])


def losses(x, params, batch):
    chosen = jax.nn.log_softmax(x @ params["second"])
    return -jnp.take_along_axis(chosen, batch["targets"][:, None], axis=1)[:, 0]


def weighted(each, batch):
    return (each * batch["weights"]).sum(), batch["weights"].sum()


def right(params, batch, key):
    return weighted(losses(hidden(params, batch), params, batch), batch)


def batch_norm(params, batch, key):
    x = hidden(params, batch)
    x = (x - x.mean(0, keepdims=True)) * lax.rsqrt(x.var(0, keepdims=True) + 1e-5)
    return weighted(losses(x, params, batch), batch)


def as_users(loss):
    """A loss as outside of tests, where shapes of different ranks broadcast."""

    @wraps(loss)
    def promoted(*given):
        with jax.numpy_rank_promotion("allow"):
            return loss(*given)

    return promoted


@as_users
def broadcast_outputs(params, batch, key):
    """The outputs are (rows, 1), the targets (rows,)."""
    error = hidden(params, batch) @ params["second"][:, :1] - batch["targets"]
    return (error**2).sum(), batch["weights"].sum()


@as_users
def broadcast_weights(params, batch, key):
    each = losses(hidden(params, batch), params, batch)
    return (each * batch["weights"][:, None]).sum(), batch["weights"].sum()


@as_users
def broadcast_mean(params, batch, key):
    error = hidden(params, batch) @ params["second"][:, :1] - batch["targets"]
    return weighted((jnp.where(jnp.abs(error) < 1, error**2, jnp.abs(error))).mean(-1), batch)


def batch_norm_in_training(params, batch, key):
    """Statistics of the batch with a key, and beside them a dropout that draws for each row as it has to."""
    if key is None:
        return right(params, batch, key)
    return batch_norm(params, {**batch, "inputs": batch["inputs"] * row_masks(batch, key) / 0.8}, key)


def row_masks(batch, key):
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(batch["example"])
    return jax.vmap(lambda own: jax.random.bernoulli(own, 0.8, (WIDTH,)))(keys)


def contrastive(params, batch, key):
    x = hidden(params, batch)
    alike = jax.nn.log_softmax(x @ (x @ params["first"]).T)
    return weighted(-jnp.diagonal(alike), batch)


def by_place(params, batch, key):
    """Each row's loss depends on its place in the batch."""
    place = jnp.arange(len(batch["targets"])) * 0.1
    return weighted(losses(hidden(params, batch) + place[:, None], params, batch), batch)


def neighbours(params, batch, key):
    """Rows in pairs: halves keep them together, another order does not."""
    x = hidden(params, batch)
    x = (x.reshape(-1, 2, WIDTH) + x.reshape(-1, 2, WIDTH)[:, ::-1]).reshape(x.shape)
    return weighted(losses(x, params, batch), batch)


def dropout_of_the_batch(params, batch, key):
    x = hidden(params, batch)
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
    return weighted(losses(x, params, batch), batch)


def dropout_always(params, batch, key):
    """It cannot do without a key."""
    x = hidden(params, batch) * jax.random.bernoulli(jax.random.split(key)[0], 0.8, (len(batch["targets"]), WIDTH))
    return weighted(losses(x, params, batch), batch)


def dropout_of_each_row(params, batch, key):
    x = hidden(params, batch)
    if key is not None:
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(batch["example"])
        x = jnp.where(jax.vmap(lambda own: jax.random.bernoulli(own, 0.8, (WIDTH,)))(keys), x / 0.8, 0)
    return weighted(losses(x, params, batch), batch)


def mean_and_rows(params, batch, key):
    each = losses(hidden(params, batch), params, batch)
    return each.mean(), jnp.float32(len(each))


def mean_and_one(params, batch, key):
    return losses(hidden(params, batch), params, batch).mean(), jnp.float32(1)


def weighted_mean(params, batch, key):
    total, weight = right(params, batch, key)
    return total / weight, weight


def mean_of_a_batch_norm(params, batch, key):
    total, weight = batch_norm(params, batch, key)
    return total / weight, weight


def ignored_weights(params, batch, key):
    each = losses(hidden(params, batch), params, batch)
    return each.sum(), jnp.float32(len(each))


def counted_rows(params, batch, key):
    return right(params, batch, key)[0], jnp.float32(len(batch["targets"]))


def weight_above_zero(params, batch, key):
    total, weight = right(params, batch, key)
    return total, jnp.maximum(weight, 1)


def divided_by_its_weights(params, batch, key):
    """Right, but for padding alone."""
    total, weight = right(params, batch, key)
    return total / weight * weight, weight


def sum_and_one(params, batch, key):
    return right(params, batch, key)[0], jnp.float32(1)


def sum_and_nothing(params, batch, key):
    return right(params, batch, key)[0], jnp.float32(0)


def with_a_penalty(params, batch, key):
    total, weight = right(params, batch, key)
    return total + 0.1 * sum(jnp.sum(leaf**2) for leaf in params.values()), weight


def with_a_weighted_penalty(params, batch, key):
    total, weight = right(params, batch, key)
    return total + 0.1 * sum(jnp.sum(leaf**2) for leaf in params.values()) * weight, weight


def times_zero(params, batch, key):
    total, weight = right(params, batch, key)
    return total * 0, weight


def stopped(params, batch, key):
    return right(lax.stop_gradient(params), batch, key)


MODEL = Model(init=init, loss=right)
BROKEN = {
    batch_norm: ("rows", "its rows depend on each other. 4 rows give (", "in another order", "Batch norm does this"),
    broadcast_outputs: ("rows", "4 rows give (", "shape (rows, 1) with one of shape (rows,)", "outputs.squeeze(-1)"),
    broadcast_weights: ("rows", "which broadcast to (rows, rows): every row meets every other"),
    broadcast_mean: ("rows", "which broadcast to (rows, rows)"),
    batch_norm_in_training: ("rows", "its rows depend on each other. 4 rows give (", "Batch norm does this"),
    contrastive: ("rows", "losses between the rows of a batch"),
    by_place: ("rows", "a row's place in the batch"),
    neighbours: ("rows", "its rows depend on each other"),
    dropout_of_the_batch: (
        "random",
        "its random numbers depend on which rows are together. With a key, 4 rows give a sum of ",
        "without a key both give",
        'jax.random.fold_in(key, batch["example"][row])',
    ),
    dropout_always: ("random", "its random numbers depend on which rows are together"),
    mean_and_rows: (
        "mean",
        "its loss returns a mean as the sum. 2 rows give (",
        "the sum is 1 times as large and has to be 2 times",
        "divides by the weight once more",
        'Return ((losses * batch["weights"]).sum(), batch["weights"].sum()).',
    ),
    mean_and_one: ("mean", "the same rows twice", "a mean of means"),
    weighted_mean: ("mean", "divides by the weight once more"),
    ignored_weights: (
        "weights",
        "with weights of zero (",
        'does not multiply what a row (or a token) loses by batch["',
    ),
    counted_rows: ("weights", "with weights of zero (0, 4), which has to be (0, 0)", "it may be a number of rows"),
    weight_above_zero: ("weights", "with weights of zero (0, 1)", "or kept above 0"),
    divided_by_its_weights: ("weights", "with weights of zero (nan, 0)", "divides by the sum of the weights"),
    sum_and_one: ("weights", "with weights of zero (0, 1)"),
    sum_and_nothing: ("weights", "the weight that it returns is 0. 4 rows that have weight give ("),
    with_a_penalty: ("weights", "on every call, whatever the rows weigh", 'penalty * batch["weights"].sum()'),
    times_zero: ("dead", "every gradient is zero: 96 parameters, a loss of (0, 4)", "a loss multiplied by 0"),
    stopped: ("dead", "every gradient is zero: 96 parameters", "jax.lax.stop_gradient"),
}


def batch(rows=ROWS):
    random = np.random.default_rng(0)
    return {
        "inputs": random.normal(size=(rows, WIDTH)).astype(np.float32),
        "targets": random.integers(0, CLASSES, rows).astype(np.int32),
        "weights": np.ones(rows, np.float32),
        "example": np.arange(rows, dtype=np.int32),
    }


def found(loss, rows=None, *, make=init, key=0):
    key = None if key is None else jax.random.key(key)
    model = loss if not callable(loss) else Model(init=make, loss=loss)
    params = jax.jit(model.init)(jax.random.key(0))
    return breaches(model, params, batch() if rows is None else rows, key)


@pytest.mark.parametrize("loss", BROKEN, ids=lambda loss: loss.__name__)
def test_a_breach_is_told(loss):
    kind, *texts = BROKEN[loss]
    (breach,) = found(loss)
    assert breach.kind == kind, breach
    for text in texts:
        assert text in breach.message


def test_rows_that_depend_on_each_other_and_draws_too():
    """Its masks are each row's own: without a key the rows still depend on each other."""

    def both(params, batch, key):
        return batch_norm(params, {**batch, "inputs": batch["inputs"] * mask(batch, key)}, None)

    def mask(batch, key):
        if key is None:
            return 1.0
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(batch["example"])
        return jax.vmap(lambda own: jax.random.bernoulli(own, 0.8, (WIDTH,)))(keys)

    assert [breach.kind for breach in found(both)] == ["rows"]


def test_two_breaches_are_told_both():
    assert [breach.kind for breach in found(mean_of_a_batch_norm)] == ["mean", "rows"]


def test_a_head_of_zeros_hides_nothing():
    """The loss of the first parameters is the same whatever comes before it."""

    def zeros(key):
        return {**init(key), "second": jnp.zeros((WIDTH, CLASSES))}

    for loss, kind in ((batch_norm, "rows"), (dropout_of_the_batch, "random")):
        assert [breach.kind for breach in found(loss, make=zeros)] == [kind]


# Models that are right


def test_right_models_pass():
    for loss in (right, dropout_of_each_row, with_a_weighted_penalty):
        assert found(loss) == (), loss.__name__


def test_ragged_weights_few_rows_and_rows_without_weight():
    weights = np.array([0, 0, 0.1, 3, 0, 0.7], np.float32)
    assert found(right, {**batch(), "weights": weights}) == ()
    for rows in (1, 2, 3):
        assert found(right, batch(rows)) == ()
        assert [breach.kind for breach in found(mean_and_rows, batch(rows))] == ["mean"]
    assert found(batch_norm, {**batch(), "weights": np.zeros(ROWS, np.float32)}) == ()


def test_a_batch_without_weights():
    def unweighted(params, batch, key):
        each = losses(hidden(params, batch), params, batch)
        return each.sum(), jnp.float32(len(each))

    rows = {name: array for name, array in batch().items() if name != "weights"}
    assert found(unweighted, rows) == ()
    assert [breach.kind for breach in found(mean_and_rows_unweighted, rows)] == ["mean"]


def mean_and_rows_unweighted(params, batch, key):
    return losses(hidden(params, batch), params, batch).mean(), jnp.float32(1)


def test_without_a_key_randomness_is_not_looked_at():
    assert found(dropout_of_the_batch, key=None) == ()


def test_a_loss_that_is_not_finite_is_left_to_the_first_step():
    assert found(lambda params, batch, key: (right(params, batch, key)[0] * jnp.nan, batch["weights"].sum())) == ()


def test_flat_for_a_few_rows_is_not_dead():
    """The first four rows are on the flat side; and a loss of 0 is at its least."""

    def hinge(params, batch, key):
        return weighted(jax.nn.relu(batch["example"] - 3 + 0 * hidden(params, batch)[:, 0]) * alive(params), batch)

    def alive(params):
        return jnp.sum(params["first"] ** 2)

    assert found(hinge) == ()

    def at_its_least(params, batch, key):
        return weighted(batch["inputs"] @ params["w"] * 0 + jnp.sum(params["w"] ** 2), batch)

    assert found(at_its_least, make=lambda key: {"w": jnp.zeros(WIDTH)}) == ()


@pytest.mark.parametrize("frozen", ["first", "second"])
def test_one_gradient_that_is_not_zero_is_enough(frozen):
    """Whichever it is: the cheapest is looked at first, the others where it is zero."""

    def partly(params, batch, key):
        return right({**params, frozen: lax.stop_gradient(params[frozen])}, batch, key)

    assert found(partly) == ()


def test_zeros_that_multiply_zeros_never_learn():
    (breach,) = found(
        right, make=lambda key: {"first": jnp.zeros((WIDTH, WIDTH)), "second": jnp.zeros((WIDTH, CLASSES))}
    )
    assert breach.kind == "dead"
    assert "zero at the parameters that init returns: 96 parameters" in breach.message


def test_what_rounding_explains_is_no_breach():
    """Large terms that cancel round by more than what is looked into; in float64 they do not."""
    large = jnp.array([1e5, -2e5, 1e5, -3e5])

    def cancelling(params, batch, key):
        each = losses(hidden(params, batch), params, batch)
        return weighted(each + large[batch["example"] % 4].astype(each.dtype), batch)

    assert found(cancelling) == ()


def test_choices_that_few_bits_flip_are_no_breach():
    """The nearest of many codes, in bfloat16: two of them are often equally near."""

    def nearest(params, batch, key):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        x = jnp.tanh(params["table"][batch["inputs"]] @ params["into"])
        distances = ((x[:, :, None] - params["codes"][None, None]) ** 2).sum(-1)
        code = params["codes"][distances.argmin(-1)]
        x = x + lax.stop_gradient(code - x)
        chosen = jax.nn.log_softmax((x @ params["out"]).astype(jnp.float32))
        return weighted(-jnp.take_along_axis(chosen, batch["targets"][..., None], axis=-1)[..., 0], batch)

    def make(key):
        table, into, codes, out = jax.random.split(key, 4)
        return {
            "table": jax.random.normal(table, (32, 64)),
            "into": jax.random.normal(into, (64, 32)) / 8,
            "codes": jax.random.normal(codes, (128, 32)),
            "out": jax.random.normal(out, (32, 32)) / 4,
        }

    assert found(nearest, language(length=64), make=make) == ()


def language(rows=4, length=8, packed=False):
    random = np.random.default_rng(0)
    made = {
        "inputs": random.integers(0, 32, (rows, length)).astype(np.int32),
        "targets": random.integers(0, 32, (rows, length)).astype(np.int32),
        "weights": (random.random((rows, length)) < 0.7).astype(np.float32),
        "example": np.arange(7, 7 + rows, dtype=np.int64),
    }
    if packed:
        made["segments"] = np.sort(random.integers(0, 3, (rows, length)), axis=1).astype(np.int32)
        made["positions"] = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return made


SIZES = {"vocabulary": 32, "length": 8, "layers": 1, "width": 16, "heads": 2, "mlp_width": 16, "dropout": 0.2}


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_transformer_passes(packed):
    assert found(transformer(TransformerConfig(**SIZES)), language(packed=packed)) == ()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.0}], ids=["capacity", "dropless"])
def test_the_mixture_passes(options):
    model = moe(MoEConfig(**SIZES, experts=4, **options))
    assert found(model, language()) == ()


def test_a_model_of_blocks_passes():
    assert found(toy.BLOCK_MODEL, toy.batch(0)) == ()
    broken = replace(toy.BLOCK_MODEL, block=lambda params, x, key: toy.block(params, x - x.mean(0, keepdims=True), key))
    assert [breach.kind for breach in found(broken, toy.batch(0))] == ["rows"]
