"""`check_model`, its measurements of a few rows, and the generator of its random numbers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.keys import make_key
from spmdkit.parallel import Model
from spmdkit.parallel.verification.contract import breaches as file
from spmdkit.parallel.verification.contract import probe as probe_file
from spmdkit.parallel.verification.contract.breaches import Breach, ContractError, check_model, report
from spmdkit.parallel.verification.contract.pairs import Pair, Pairs
from spmdkit.parallel.verification.contract.probe import ROWS, Probe, count, first_rows, moved, quick_compilation
from spmdkit.parallel.verification.contract.random_key import check_key, shared_key

BATCH = {"inputs": np.ones((4, 3), np.float32), "weights": np.ones(4, np.float32)}
BROKEN = (Breach("rows", "its rows depend."), Breach("mean", "it is a mean."))


def init(key):
    return {"w": jax.random.normal(key, (3,), jnp.float32)}


def loss(params, batch, key):
    return (batch["weights"] * (batch["inputs"] @ params["w"])).sum(), batch["weights"].sum()


def mean(params, batch, key):
    return (batch["weights"] * (batch["inputs"] @ params["w"])).mean(), jnp.float32(1)


MODEL, MEAN = Model(init=init, loss=loss, name="mine"), Model(init=init, loss=mean, name="mine")


@pytest.fixture
def measured(monkeypatch):
    """What is measured, without measuring: the arguments, in order."""
    given = []
    monkeypatch.setattr(file, "breaches", lambda *arguments: given.append(arguments) or ())
    return given


def test_accepts_correct_model():
    assert check_model(MODEL, BATCH) == ()


@pytest.mark.slow
def test_breach_is_error_warning_or_ignored():
    with pytest.raises(ContractError, match=r"model 'mine' breaks the contract \(mean\): its loss returns a mean"):
        check_model(MEAN, BATCH)
    with pytest.warns(UserWarning, match="breaks the contract"):
        (breach,) = check_model(MEAN, BATCH, check="warn")
    assert breach.kind == "mean"
    assert check_model(MEAN, BATCH, check="off") == ()


def test_off_traces_functions_without_measuring(measured):
    assert check_model(MODEL, BATCH, check="off") == ()
    assert measured == []
    wrong = Model(init=init, loss=lambda params, batch, key: batch["inputs"] @ params["absent"])
    with pytest.raises(UserError, match="absent"):
        check_model(wrong, BATCH, check="off")


@pytest.mark.parametrize(
    ("batch", "check", "text"),
    [
        (BATCH, "loud", "check='loud' is not one of error, warn, off."),
        ({**BATCH, "weights": np.ones(3)}, "error", r"these have \{'inputs': 4, 'weights': 3\}"),
        ({**BATCH, "rate": np.float32(1)}, "error", "'rate': 'no dim'"),
    ],
)
def test_rejects_invalid_arguments(batch, check, text):
    with pytest.raises(UserError, match=text):
        check_model(MODEL, batch, check=check)


def test_adds_missing_row_index(measured):
    check_model(MODEL, BATCH)
    check_model(MODEL, {**BATCH, "example": np.arange(7, 11)})
    assert [arguments[2]["example"].tolist() for arguments in measured] == [[0, 1, 2, 3], [7, 8, 9, 10]]


def test_uses_given_or_drawn_parameters(measured):
    given = {"w": np.ones(3)}
    check_model(MODEL, BATCH, params=given)
    check_model(MODEL, BATCH, seed=0)
    check_model(MODEL, BATCH, seed=1)
    first, drawn, other = (arguments[1]["w"] for arguments in measured)
    assert first is given["w"]
    assert not np.array_equal(drawn, other)
    keys = [jax.random.key_data(arguments[3]).tolist() for arguments in measured]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0] == jax.random.key_data(jax.random.fold_in(make_key(0), 0)).tolist(), "as in the first step"


def test_rejects_model_that_needs_too_much_memory(monkeypatch):
    monkeypatch.setattr(probe_file, "MAX_TEMPORARY_BYTES", -1)
    with pytest.raises(UserError, match=r"model 'mine': 4 rows on one device need 0.0 GiB. Give a smaller model"):
        check_model(MODEL, BATCH)


def test_reports_all_breaches_at_once():
    with pytest.raises(ContractError) as raised:
        report("model.name='mine'", BROKEN, "error")
    assert str(raised.value) == (
        "model.name='mine' breaks the contract (rows): its rows depend.\n"
        "model.name='mine' breaks the contract (mean): it is a mean. "
        "To train it as it is, set model.check: warn, or off."
    )
    report("x", BROKEN, "off")
    report("x", (), "error")


INPUTS = np.arange(1.0, ROWS + 1, dtype=np.float32)
PROBE_BATCH = {"inputs": INPUTS, "weights": np.array([1.0, 0.5, 0.75, 0.25], np.float32), "n": np.arange(ROWS)}


def probe_loss(params, batch, key):
    """Counts the row's place in the batch, so that the arrangements differ."""
    place = jnp.arange(len(batch["inputs"]), dtype=batch["inputs"].dtype)
    return (batch["weights"] * (batch["inputs"] * params["w"] + 10 * place)).sum(), batch["weights"].sum()


PROBE_MODEL = Model(init=lambda key: {"w": jnp.ones(())}, loss=probe_loss)
PARAMS = {"w": np.float32(2.0)}


def pair_of(rows):
    weights = PROBE_BATCH["weights"][rows]
    return Pair(float(weights @ (2 * INPUTS[rows] + 10 * np.arange(len(rows)))), float(weights.sum()))


def probe(model=PROBE_MODEL, dtype="float32"):
    made = Probe(model, dtype, PARAMS, PROBE_BATCH, make_key(0))
    made.moved = made.given
    return made


def test_sums_each_arrangement():
    found = probe().sums()
    assert found == Pairs(*map(pair_of, ([0, 1, 2, 3], [0, 1], [2, 3], [2, 0, 3, 1])), Pair(0, 0))
    assert found.halves == tuple(np.add(pair_of([0, 1]), pair_of([2, 3])))


def test_sums_of_halves_do_not_hide_an_order_that_matters():
    """Every second place counts twice: two halves add up, but the same rows in another order do not."""

    def alternating(params, batch, key):
        twice = 1 + jnp.arange(len(batch["inputs"]), dtype=batch["inputs"].dtype) % 2
        return (batch["weights"] * batch["inputs"] ** 2 * twice).sum(), batch["weights"].sum()

    found = probe(replace(PROBE_MODEL, loss=alternating)).sums()
    assert found.halves == found.whole
    assert (found.adds_up(1e-5), found.are_right(1e-5)) == (False, False)


def test_float64_probe_keeps_integers_narrow():
    seen = {}

    def recording(params, batch, key):
        seen.update({name: str(array.dtype) for name, array in batch.items()})
        return probe_loss(params, batch, key)

    probe(replace(PROBE_MODEL, loss=recording), "float64").pair(PROBE_BATCH)
    assert seen == {"inputs": "float64", "weights": "float64", "n": "int32"}
    assert not jax.config.jax_enable_x64


def test_selects_first_rows_with_weight_and_makes_weights_ragged():
    weights = np.array([0, 2, 0, 4, 8, 16, 32], np.float32)
    for shape in ((7,), (7, 1)):  # of rows, of tokens
        found = first_rows({"n": np.arange(7), "weights": weights.reshape(shape)})
        assert found["n"].tolist() == [1, 3, 4, 5]
        assert found["weights"].ravel().tolist() == [2, 2, 6, 4]
        assert found["weights"].dtype == np.float32


def test_repeats_few_rows():
    assert first_rows({"n": np.arange(3)})["n"].tolist() == [0, 1, 2, 0]
    assert count(first_rows({"n": np.arange(99)}, most=64)) == 64
    assert first_rows({"n": np.arange(3), "weights": np.zeros(3)}) is None
    assert first_rows({"weights": np.full(4, 2)})["weights"].tolist() == [2, 2, 2, 2], "integers stay"


def test_moves_parameters_off_zero_and_one():
    given = {"ones": np.ones(50, np.float32), "zeros": np.zeros(50, np.float32), "n": np.arange(3)}
    found = moved(given)
    assert 0 < np.abs(found["ones"] - 1).max() <= 0.1
    assert ((found["zeros"] >= 0.05) & (found["zeros"] <= 0.15)).all()
    assert len(np.unique(found["zeros"])) == 50
    assert (found["n"] is given["n"], found["ones"].dtype) == (True, np.float32)


def test_quick_compilation_restores_option(monkeypatch):
    changed = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: changed.append(value))
    before = jax.config.read("jax_disable_most_optimizations")
    with pytest.raises(ZeroDivisionError), quick_compilation():
        raise ZeroDivisionError
    assert changed == [True, before]


@pytest.fixture
def key():
    return check_key(jax.random.key(3))


def test_numbers_have_requested_distribution(key):
    normal = np.asarray(jax.random.normal(jax.random.split(key, 5)[3], (1000, 10)))
    assert (abs(normal.mean()) < 0.05, abs(normal.std() - 1) < 0.05) == (True, True)
    assert abs(np.corrcoef(normal[:-1].ravel(), normal[1:].ravel())[0, 1]) < 0.05
    assert abs(float(jnp.mean(jax.random.bernoulli(key, 0.3, (10_000,)))) - 0.3) < 0.02


@pytest.mark.slow
def test_different_keys_draw_different_numbers(key):
    keys = [key, jax.random.fold_in(key, 0), jax.random.fold_in(key, 1), *jax.random.split(key, 3)]
    drawn = {tuple(jax.random.bits(key, (4,)).tolist()) for key in [*keys, check_key(jax.random.key(4))]}
    assert len(drawn) == 7
    folded = jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(key, n), ()))(jnp.arange(1000))
    assert len(np.unique(folded)) > 990
    assert abs(float(folded.mean()) - 0.5) < 0.05


def test_shared_key_draws_one_small_number_for_all_rows(key):
    shared = shared_key(key)
    rows = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(shared, row), (3,)))(jnp.arange(4))
    assert len(np.unique(rows)) == 1
    assert 0 <= float(rows[0, 0]) < 1 / 16
    first, second = jax.random.split(shared)
    assert first == second != shared
